"""aten's flash attention forward operators on the kernels of cute_attn: arguments, layouts and results.

`sdpa.py` registers these functions with torch's dispatcher; they can be called on their own. Results are what aten
promises: out with query's strides, and the lse in the natural-log domain, contiguous and fp32, -inf for a token that
sees no key. Softmax is exact, scores are summed in fp32, and no gradients are computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_attn.integrations import workspaces
from cute_attn.prefill import single_prefill_with_kv_cache
from cute_attn.problem import BatchLengths
from cute_attn.request import checks, unplanned
from cute_attn.request.batch_run import RunArguments
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.request.unplanned import Keys
from cute_attn.runtime import capture
from cute_attn.runtime.staging import is_capturing
from cute_attn.wrappers import planned_prefill
from cute_attn.wrappers.planned_prefill import Structure
from cute_attn.xqa import xqa_batch_decode_with_kv_cache

TO_TRAIN = (
    ", or train with cute_attn.integrations.sdpa.deactivate() or another backend of torch.nn.attention.sdpa_kernel"
)
NAME = "cute_attn under torch's scaled_dot_product_attention and varlen_attn"
_refuse = functools.partial(checks.refuse, who=NAME)


class Operands(NamedTuple):
    """Tensors of a call, with the same order of axes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    def each(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Operands:
        """Return the same view of every tensor."""
        return Operands(*map(view, self))


class Band(NamedTuple):
    """The keys that a query token sees: up to its own position if causal, and window_left before it (-1: all). `scale`:
    of the scores; None: the default.
    """

    causal: bool
    window_left: int = -1
    scale: float | None = None

    @classmethod
    def of(cls, is_causal: bool, left: int | None, right: int | None, scale: float | None) -> Band:
        """Return the band of aten's arguments, in which None and -1 are no bound; a bound right of 0 is refused."""
        if right is not None and right > 0 and not is_causal:
            _refuse(f"window_size_right={right}", "windows end at the query's own position", "window_size (left, 0)")
        return cls(is_causal or right == 0, -1 if left is None or left < 0 else left, scale)


# ---- aten's operators


def scaled_dot_product_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute `aten::_scaled_dot_product_flash_attention`.

    Parameters
    ----------
    query, key, value : `[batch_size, heads, tokens, head_dim]` fp16 or bf16, any strides with 1 on the last axis; heads
        of query are a multiple of those of key and value. Nothing is copied.
    dropout_p, return_debug_mask : refused unless 0 and False.
    is_causal : token i sees keys j <= i + kv_len - qo_len.
    scale : of the scores; default `head_dim ** -0.5`.

    Returns
    -------
    aten's nine results: out like query, fp32 lse `[batch_size, heads, tokens]`, None, None, the two lengths, and three
    tensors about random numbers and debugging without content.

    Raises
    ------
    ArgumentError (gradients are required), NotSupported (what is refused above, or no backend takes).
    """
    _check(dropout_p, return_debug_mask, query=query, key=key, value=value)
    out = torch.empty_like(query)
    lse = dense(Operands(query, key, value, out), Band(is_causal, scale=scale))
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def flash_attention_forward(query: torch.Tensor, *others: Any, **options: Any) -> tuple[Any, ...]:
    """Compute `aten::_flash_attention_forward`.

    Parameters
    ----------
    others : the parameters of `flash_attention_into` that follow query.
    query, key, value : `[batch_size, tokens, heads, head_dim]`, or with `cum_seq_q` `[tokens, heads, head_dim]`.
    cum_seq_q, cum_seq_k : None, or int32 `[batch_size + 1]`: where the tokens of each request start. They are read on
        the host: a synchronisation per call, which no CUDA graph can capture.
    max_q, max_k : the longest request.
    options : scale, window_size_left, window_size_right (None, -1 or 0), num_splits (a hint); seqused_k and block_table
        of a paged cache, `[pages, page_size, heads, head_dim]`, which a CUDA graph can capture. A paged cache needs
        causal attention, or one query token per request.
    dropout_p, return_debug_mask, is_causal : as for `scaled_dot_product_flash_attention`.

    Returns
    -------
    aten's five results: out like query, fp32 lse `[batch_size, heads, tokens]` or `[heads, tokens]`, and three tensors
    without content. Rows of no request, before cum_seq_q[0] or from its last on, have out 0 and lse -inf.

    Raises
    ------
    ArgumentError (gradients are required), NotSupported (what is refused above, alibi_slopes, or no backend takes).
    """
    out = torch.empty_like(query)
    return out, flash_attention_into(out, query, *others, **options), *_unused(query)


def flash_attention_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *flags: Any,
    **options: Any,
) -> torch.Tensor:
    """Compute `aten::_flash_attention_forward_no_dropout_inplace`: as `flash_attention_forward`, into `out`.

    `flags` are dropout_p, is_causal and return_debug_mask. Returns the lse.
    """
    dropout_p, is_causal, return_debug_mask = flags
    _check(dropout_p, return_debug_mask, out=out, query=query, key=key, value=value)
    options = {name: option for name, option in options.items() if option is not None and name != "num_splits"}
    operands, given = Operands(query, key, value, out), ("window_size_left", "window_size_right", "scale")
    band = Band.of(is_causal, *(options.pop(name, None) for name in given))
    seq_lens, tables = options.pop("seqused_k", None), options.pop("block_table", None)
    for name in options:
        _refuse(name, "the kernels here have no such argument", "a call without it")
    if tables is not None and seq_lens is not None and cum_seq_q is not None:
        return _paged(operands, (cum_seq_q, tables, seq_lens), (max_q, max_k), band)
    if tables is not None or seq_lens is not None:
        _refuse("seqused_k or block_table alone", "keys are ragged, or paged", "cum_seq_q, seqused_k and block_table")
    if cum_seq_q is None:
        return dense(operands.each(lambda x: x.transpose(1, 2)), band)
    return _ragged(operands, cum_seq_q, cum_seq_k, band)


def refuse_backward(*args: Any, **kwargs: Any) -> Any:
    """Refuse aten's flash attention backward operators."""
    _refuse("the backward pass", "the kernels compute no gradients", "torch.nn.attention.sdpa_kernel with another one")


# ---- layouts


def dense(operands: Operands, band: Band) -> torch.Tensor:
    """Write the attention of a batch `[batch, heads, tokens, head_dim]` of equal lengths to out; return the lse.

    Where the batch and the heads of every tensor are one axis of equal steps, the batch is one request with all those
    heads: a launch without a plan. Where the batch and the tokens of q and out are one, it is a ragged batch, or, for k
    and v of other strides, a paged one with a page per request. Otherwise, and without keys, every request is a launch.
    """
    q, out = operands.q, operands.out
    batch, heads, qo_len, _ = q.shape
    if not batch or not heads:
        return q.new_empty((batch, heads, qo_len), dtype=torch.float32)
    if all(_is_one_axis(x, 1) for x in operands):
        lse = _single(operands.each(lambda x: x.flatten(0, 1)), band)
        return lse.view(qo_len, batch, heads).permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
    planned = operands.k.shape[2] and not is_capturing(q.device)  # later calls would overwrite the records of a plan
    if planned and _is_one_axis(q, 2) and _is_one_axis(out, 2):
        lse = _tokens(operands.each(lambda x: x.transpose(1, 2)), band)
        return lse.view(batch, qo_len, heads).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return torch.stack([_single(Operands(*request), band).t() for request in zip(*operands, strict=True)])


def _single(operands: Operands, band: Band) -> torch.Tensor:
    """Compute one request of `[heads, tokens, head_dim]`; return the lse `[qo_len, heads]`."""
    q, k, v, out = operands
    _, lse = single_prefill_with_kv_cache(
        q.transpose(0, 1),
        k,
        v,
        causal=band.causal,
        kv_layout="HND",
        sm_scale=band.scale,
        window_left=band.window_left,
        return_lse=True,
        out=out.transpose(0, 1),
        lse_base="ln",
    )
    return lse


def _tokens(operands: Operands, band: Band) -> torch.Tensor:
    """Compute a batch of `[batch, tokens, heads, head_dim]`; return the lse `[batch * qo_len, heads]`."""
    q, k, v, out = operands
    (batch, qo_len), kv_len = q.shape[:2], k.shape[1]
    lengths = _uniform_lengths(batch, qo_len, kv_len)
    if all(_is_one_axis(x, 1) for x in (k, v)):
        keys = Keys(k.flatten(0, 1), v.flatten(0, 1))
        return _planned(q.flatten(0, 1), keys, out.flatten(0, 1), lengths, band)
    keys = Keys(k, v, _page_per_request(batch, q.device))
    return _planned(q.flatten(0, 1), keys, out.flatten(0, 1), lengths, band)


def _ragged(operands: Operands, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor | None, band: Band) -> torch.Tensor:
    """Compute a ragged batch of `[tokens, heads, head_dim]`; return the lse `[heads, tokens]`."""
    q, k, v, out = operands
    if cum_seq_k is None:
        _refuse("cum_seq_k=None without block_table", "it says where the keys of a request are", "cum_seq_k")
    unplanned.refuse_capture("varlen_attn", q.device)
    bounds = {"cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k}
    qo_indptr, kv_indptr = map(torch.from_numpy, unplanned.host_arrays(bounds, q.device))
    lengths = IndexArrays(tuple(bounds), qo_indptr, kv_indptr).on_host()
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    first, rows = lengths.first_row, lengths.rows
    _clear(operands, bounds, slice(first), slice(rows, None))
    computed = _planned(q[:rows], Keys(k, v), out[:rows], lengths, band)
    lse[:, first:rows].copy_(computed[first:].t())
    return lse


def _paged(
    operands: Operands, tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor], longest: tuple[int, int], band: Band
) -> torch.Tensor:
    """Compute a ragged batch over a paged cache without reading lengths on the host; return the lse."""
    (q, k, v, out), (cum_seq_q, block_table, seq_lens), (max_q, max_k) = operands, tables, longest
    if max_q > 1 and not band.causal:
        _refuse("block_table without a causal mask", "several query tokens see keys up to their own", "window (-1, 0)")
    lse = q.new_full((q.shape[0], q.shape[1]), -math.inf, dtype=torch.float32)
    arrays = {"cum_seq_q": cum_seq_q, "block_table": block_table, "seqused_k": seq_lens}
    _clear(operands, arrays, slice(None))  # only the device knows which rows are of requests
    xqa_batch_decode_with_kv_cache(
        q,
        (k, v),
        workspaces.too_small(q.device),
        block_table,
        seq_lens,
        max_k,
        bmm1_scale=q.shape[-1] ** -0.5 if band.scale is None else band.scale,
        window_left=band.window_left,
        out=out,
        q_len_per_req=max(1, max_q),
        q_cu_seq_lens=cum_seq_q,
        lse=lse,
    )
    return torch.mul(lse.t(), math.log(2.0), out=lse.new_empty(lse.shape[::-1]))


def _clear(operands: Operands, arrays: Mapping[str, torch.Tensor | None], *rows: slice) -> None:
    """Write 0 to `rows` of out, which may be of no request; an out that holds what the call reads is refused."""
    q, k, v, out = operands
    checks.apart((("out", out),), (("query", q), ("key", k), ("value", v), *arrays.items()))
    for some in rows:
        out[some].zero_()


def _planned(q: torch.Tensor, keys: Keys, out: torch.Tensor, lengths: BatchLengths, band: Band) -> torch.Tensor:
    """Compute a batch under the plan of an earlier call with these lengths, or a new one; return the lse."""
    structure = Structure.of(
        q, keys, o_data_type=out.dtype, lse_base="ln", causal=band.causal, window_left=band.window_left
    )
    scale = q.shape[2] ** -0.5 if band.scale is None else band.scale
    run = RunArguments(q, (keys.k, keys.v), q_scale=scale, out=out, return_lse=True)
    arrays = lengths.qo_indptr, lengths.kv_indptr, lengths.kv_len
    _, lse = planned_prefill.run(workspaces.of_stream(q.device), structure, run, keys, arrays)
    return lse


@functools.lru_cache(64)
def _uniform_lengths(batch: int, qo_len: int, kv_len: int) -> BatchLengths:
    """Return the lengths of a batch, and where the keys of each request start."""
    requests = np.arange(batch + 1, dtype=np.int64)
    return BatchLengths(requests * qo_len, requests * kv_len, np.full(batch, kv_len))


@functools.lru_cache(64)
def _page_per_request(batch: int, device: torch.device) -> torch.Tensor:
    pages = functools.partial(torch.arange, batch, dtype=torch.int32, device=device)
    return capture.outside(device, pages)[:, None]


def _is_one_axis(x: torch.Tensor, axis: int) -> bool:
    """Tell whether axis 0 continues where another ends, so that both are one axis without a copy."""
    return x.shape[0] == 1 or x.shape[axis] == 1 or x.stride(0) == x.shape[axis] * x.stride(axis)


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return aten's state of random numbers and debug mask, which nothing reads without dropout."""
    state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return *state, query.new_empty(0)


# ---- refusals


def _check(dropout_p: float, return_debug_mask: bool, **tensors: torch.Tensor) -> None:
    if dropout_p != 0.0:
        _refuse(f"dropout_p={dropout_p}", "the kernels are for inference", "dropout_p=0.0, module.eval()")
    if return_debug_mask:
        _refuse("return_debug_mask", "the kernels keep no probabilities", "return_debug_mask=False")
    for name, tensor in tensors.items():
        checks.check_grad(name, tensor, TO_TRAIN)
