"""Replays of decode calls without a plan: a call that differs from an earlier one only in addresses skips the checks.

The layers of a model, and its steps, call with tensors of the same shapes, strides and dtypes, and with the same
options. The second such call leaves a `CachedCall`; later ones check their addresses and pass them to the launch. Calls
with draft masks, ragged queries, block scales, buffers for the lse, or scales that are tensors always take the full
path (`request.decode.decode_problem`), and so do all where values are looked at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from cute_attn.dispatch import backends
from cute_attn.dispatch.backends import DecodeRepeat
from cute_attn.problem import DecodeProblem
from cute_attn.request import checks
from cute_attn.request.operands import ALIGNMENT
from cute_attn.runtime import switches
from cute_attn.wrappers.run_cache import PLAIN_TYPES, buffer_key, outputs_qualify

CACHE_SIZE = 512  # calls: batches of any size must not fill memory

Result = Tensor | tuple[Tensor, Tensor]


class Tensors(NamedTuple):
    """The tensors of a call as the user gave them."""

    query: Any
    kv_cache: Any
    workspace_buffer: Any
    block_tables: Any
    seq_lens: Any
    sinks: Any
    out: Any


class CachedCall(NamedTuple):
    """A call that passed every check, and how to launch it again."""

    repeat: DecodeRepeat
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    lse_shape: tuple[int, ...] | None
    v_offset: int  # bytes from the address of k to that of v in a cache of one tensor
    spans: tuple[int, int, int, int, int]  # bytes that query, k, v, out and lse cover
    more_spans: tuple[int, int, int]  # bytes that block_tables, seq_lens and sinks cover


_cached: dict[Any, CachedCall] = {}
_seen: set[int] = set()  # hashes of keys that came once


def forget() -> None:
    """Forget all calls."""
    _cached.clear()
    _seen.clear()


def looks_at_values(device: torch.device) -> bool:
    """Tell whether calls look at lengths and page numbers: where that costs nothing or was asked for."""
    return device.type == "cpu" or switches.validates()


def key_of(tensors: Tensors, numbers: tuple[Any, ...], names: tuple[Any, ...]) -> Any:
    """Return what equal calls have in common besides addresses; None for a call that the full path must look at.

    `numbers`: options whose values may be equal although their types differ; `names`: all other options.
    """
    query, cache, workspace, tables, seq_lens, sinks, out = tensors
    try:
        if looks_at_values(query.device):
            return None
        if isinstance(cache, Tensor):
            kv: Any = cache.shape, cache.stride(), cache.dtype, cache.device
        else:
            k, v = cache
            kv = k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device
        return (
            *(query.shape, query.stride(), query.dtype, query.device, kv),
            *(workspace.shape, workspace.stride(), workspace.dtype, workspace.device),
            *(tables.shape, tables.stride(), tables.dtype, tables.device),
            *(seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device),
            *(buffer_key(sinks), buffer_key(out), tuple(map(type, numbers)), numbers, names),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):  # no tensors, or sparse ones
        return None


def try_replay(key: Any, tensors: Tensors) -> Result | None:
    """Launch a call like a cached one and return its result; None if there is none, or an address does not qualify."""
    try:
        cached = _cached.get(key)
    except TypeError:  # an option has no hash: the full path says what is wrong with it
        return None
    if cached is None or forward_ad._current_level >= 0:  # the full path looks for tangents
        return None
    query, cache, workspace, tables, seq_lens, sinks, out = tensors
    repeat, out_shape, out_dtype, lse_shape, v_offset, spans, (of_tables, of_lens, of_sinks) = cached
    if isinstance(cache, Tensor):
        k = v = cache
        k_start = cache.data_ptr()
        v_start = k_start + v_offset
    else:
        k, v = cache
        k_start, v_start = k.data_ptr(), v.data_ptr()
    q_start, workspace_start = query.data_ptr(), workspace.data_ptr()
    if (q_start | k_start | v_start | workspace_start) % ALIGNMENT:
        return None
    if query.is_neg() or k.is_neg() or v.is_neg() or workspace.is_neg() or tables.is_neg() or seq_lens.is_neg():
        return None
    if is_grad_enabled() and (query.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if sinks is not None and (sinks.is_neg() or sinks.requires_grad):
        return None
    tables_start, lens_start = tables.data_ptr(), seq_lens.data_ptr()
    sinks_start = 0 if sinks is None else sinks.data_ptr()
    end = workspace_start + workspace.nbytes
    read = (
        *((q_start, q_start + spans[0]), (k_start, k_start + spans[1]), (v_start, v_start + spans[2])),
        *((tables_start, tables_start + of_tables), (lens_start, lens_start + of_lens)),
        (sinks_start, sinks_start + of_sinks),
    )
    for other_start, other_end in read:
        if workspace_start < other_end and other_start < end:
            return None
    if out is None:
        out = query.new_empty(out_shape, dtype=out_dtype)
    else:
        protected = *(("", extent) for extent in read[3:]), ("", (workspace_start, end))
        if not outputs_qualify(spans, (q_start, k_start, v_start), out, None, protected):
            return None
    lse = None if lse_shape is None else query.new_empty(lse_shape, dtype=torch.float32)
    repeat(
        *(query, workspace_start, q_start, k_start, v_start, out.data_ptr(), 0 if lse is None else lse.data_ptr()),
        *(sinks_start, tables_start, lens_start),
    )
    return out if lse is None else (out, lse)


def cache(
    key: Any, tensors: Tensors, numbers: tuple[Any, ...], problem: DecodeProblem, backend: str, result: Result
) -> None:
    """Cache a call that passed every check and comes for the second time, if its launch reads its tensors as they are.

    `numbers`: part of `key`; `result`: what the call returned.
    """
    if key is None or not PLAIN_TYPES.issuperset(map(type, numbers)):
        return
    if (number := hash(key)) not in _seen:
        if len(_seen) >= CACHE_SIZE:
            _seen.clear()
        _seen.add(number)
        return
    given = (tensors.query, tensors.block_tables, tensors.seq_lens, tensors.sinks)
    read = (problem.q, problem.block_tables, problem.seq_lens, problem.sinks)
    if [x is None or x.data_ptr() for x in given] != [x is None or x.data_ptr() for x in read]:
        return
    repeat = backends.repeat_decode(problem, backend)
    if repeat is None:
        return
    if len(_cached) >= CACHE_SIZE:
        _cached.clear()
    out, lse = result if isinstance(result, tuple) else (result, None)
    of_q, of_k, of_v, of_out = map(_span, (problem.q, problem.k, problem.v, problem.out))
    _cached[key] = CachedCall(
        repeat,
        tuple(out.shape),
        out.dtype,
        None if lse is None else tuple(lse.shape),
        problem.v.data_ptr() - problem.k.data_ptr(),
        (of_q, of_k, of_v, of_out, 0),
        (_span(problem.block_tables), _span(problem.seq_lens), _span(problem.sinks)),
    )


def _span(tensor: Tensor | None) -> int:
    """Return the bytes that a tensor covers."""
    if tensor is None:
        return 0
    start, stop = checks.extent(tensor)
    return stop - start
