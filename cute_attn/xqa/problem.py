"""One decode call over a paged cache, after every user error has been raised."""

from __future__ import annotations

from typing import NamedTuple

import torch


class XqaFeatures(NamedTuple):
    """What decides which code runs and how: hashable, free of addresses, strides, and of lengths but q_len."""

    device: torch.device
    q_dtype: torch.dtype
    kv_dtype: str  # of `spec.KV_BITS`
    o_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_layout: str
    q_len: int  # of the longest request
    tree: bool
    window_left: int  # -1: none
    enable_pdl: bool | None


class XqaProblem(NamedTuple):
    """Tensors and numbers of a call. Scales multiply: a float, and a one-element fp32 tensor on the device."""

    features: XqaFeatures
    q: torch.Tensor  # [num_tokens, num_qo_heads, head_dim]
    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, row] (NHD) or [num_pages, num_kv_heads, page_size, row]
    v: torch.Tensor
    block_tables: torch.Tensor  # [batch, max_pages] int32
    seq_lens: torch.Tensor  # [batch] int32 or uint32
    out: torch.Tensor  # [num_tokens, num_qo_heads, head_dim]
    workspace: torch.Tensor  # bytes
    scale: float = 1.0
    v_scale: float = 1.0
    scale_tensor: torch.Tensor | None = None
    v_scale_tensor: torch.Tensor | None = None
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None  # NVFP4 block scales, like k and v with head_dim / 16
    sinks: torch.Tensor | None = None  # [num_qo_heads] fp32, natural-log domain
    q_indptr: torch.Tensor | None = None  # [batch + 1] int32: ragged queries
    mask: torch.Tensor | None = None  # [num_tokens, words] of 32 bits: draft tokens that a row sees
    lse: torch.Tensor | None = None  # [num_tokens, num_qo_heads] fp32, base 2
