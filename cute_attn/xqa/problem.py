"""One decode call over a paged cache, after every user error has been raised."""

from __future__ import annotations

from typing import NamedTuple

import torch


class XqaFeatures(NamedTuple):
    """What decides which code runs and how: hashable, free of addresses, strides, and of lengths but q_len."""

    device: torch.device
    q_dtype: torch.dtype
    kv_dtype: str  # of `kernels.spec.KV_BITS`
    o_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    q_len: int = 1  # query tokens of every request; with `q_indptr` at most so many
    tree: bool = False  # mask bits say which draft tokens a row sees
    window_left: int = -1  # -1: none
    enable_pdl: bool | None = None
    kv_layout: str = "NHD"  # of a page
    paged: bool = True  # or k and v lie in one piece, which is one page
    lse_scale: float = 1.0  # lse is base 2 times this


class Scratch(NamedTuple):
    """Places in the caller's `buffers`: one counter a CTA (zero before and after), and room for partials."""

    buffers: tuple[torch.Tensor, ...]
    counters: int  # addresses
    counter_bytes: int
    partials: int
    partial_bytes: int


class XqaProblem(NamedTuple):
    """Tensors and numbers of a call. A scale is a float times, where there is one, a one-element tensor."""

    features: XqaFeatures
    q: torch.Tensor  # [num_tokens, num_qo_heads, head_dim]; of one token the first axis may lack
    k: (
        torch.Tensor
    )  # [num_pages, page_size, num_kv_heads, head_dim], HND with its middle axes exchanged, of any strides
    # ^ but the last; NVFP4: head_dim / 2. Without pages the first axis is not there
    v: torch.Tensor
    page_table: torch.Tensor  # int32: [batch, max_pages], or with `page_starts` the pages of all requests
    seq_lens: torch.Tensor  # [batch] int32 or uint32
    capacity: int  # no request has more keys, whatever `seq_lens` says
    out: torch.Tensor  # like q
    scratch: Scratch
    scale: float = 1.0
    v_scale: float = 1.0
    scale_tensors: tuple[torch.Tensor, ...] = ()  # at most two
    v_scale_tensor: torch.Tensor | None = None
    block_scales: tuple[torch.Tensor, torch.Tensor] | None = None  # of NVFP4 k and v: e4m3, head_dim / 16
    sinks: torch.Tensor | None = None  # [num_qo_heads] fp32, natural-log domain
    q_indptr: torch.Tensor | None = None  # [batch + 1] int32: ragged queries
    mask: torch.Tensor | None = None  # [num_tokens, words] of 32 bits: bit j of row r: r sees draft token j
    lse: torch.Tensor | None = None  # [num_tokens, num_qo_heads] fp32
    page_starts: torch.Tensor | None = None  # [batch] int32: place in `page_table` of each request's first page
