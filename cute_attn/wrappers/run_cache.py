"""Replay of a run: a run that differs from an earlier one only in addresses skips every other check.

The layers of a model run one plan with tensors that differ only in their addresses. So a run that passed every check
leaves a `CachedRun` in its plan, keyed by dtypes, shapes, strides, devices and options. A run that finds one checks its
addresses and passes them to the launch. Any other run takes the full path (`request.batch_run.problem`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, is_grad_enabled
from torch.autograd import forward_ad

from cute_attn.kernels.host.batch import Repeat
from cute_attn.problem import BatchPlan, BatchProblem, MemoryRange
from cute_attn.request import checks
from cute_attn.request.batch_run import RunArguments, protected_memory
from cute_attn.request.operands import ALIGNMENT, NARROW_ALIGNMENT

CACHE_SIZE = 256  # runs per plan: scales that change in every run must not fill memory
PLAIN_TYPES = frozenset((float, int, bool, type(None)))  # options that hash by value


class CachedRun(NamedTuple):
    """A run that passed every check, and how to launch it again."""

    repeat: Repeat
    like_q: bool  # out has q's shape and dtype, and q is contiguous
    out: tuple[int, int, int, torch.dtype]  # shape and dtype
    v_offset: int  # bytes from the address of k to that of v in a cache of one tensor
    spans: tuple[int, int, int, int, int]  # bytes that q, k, v, out and lse cover
    kv_alignment: int  # bytes: the launch reads k and v at multiples of it


def try_replay(plan: BatchPlan, arguments: RunArguments) -> tuple[Tensor, Tensor | None] | None:
    """Launch a run like a cached one and return out and lse; None if there is none, or an address does not qualify."""
    cached = plan.cached_runs.get(_cache_key(arguments))
    if cached is None or forward_ad._current_level >= 0:  # the full path looks for tangents
        return None
    q, cache, out, lse, sinks = arguments.q, arguments.kv_cache, arguments.out, arguments.lse, arguments.sinks
    if isinstance(cache, Tensor):
        k = v = cache
        k_start = cache.data_ptr()
        v_start = k_start + cached.v_offset
    else:
        k, v = cache
        k_start, v_start = k.data_ptr(), v.data_ptr()
    q_start = q.data_ptr()
    if q_start % ALIGNMENT or (k_start | v_start) % cached.kv_alignment:
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    sinks_start = 0
    if sinks is not None:
        if not _sinks_qualify(sinks):
            return None
        sinks_start = sinks.data_ptr()
    if not out is lse is None:
        protected = protected_memory(plan)
        if sinks is not None:
            protected = [*protected, ("sinks", (sinks_start, sinks_start + sinks.nbytes))]
        if not outputs_qualify(cached.spans, (q_start, k_start, v_start), out, lse, protected):
            return None
    if out is None:
        rows, heads, head_dim, dtype = cached.out
        out = empty_like(q) if cached.like_q else q.new_empty(rows, heads, head_dim, dtype=dtype)
    if lse is None and arguments.return_lse:
        lse = q.new_empty(cached.out[0], cached.out[1], dtype=torch.float32)
    lse_start = 0 if lse is None else lse.data_ptr()
    tensors = q, k, v, out, lse, sinks, plan.kv_indices, plan.workspace
    cached.repeat(q_start, k_start, v_start, out.data_ptr(), lse_start, sinks_start, tensors)
    return out, lse


def cache_run(plan: BatchPlan, arguments: RunArguments, problem: BatchProblem) -> None:
    """Cache a run that passed every check, unless its q or sinks were copied or the launch cannot be repeated."""
    repeat = getattr(plan.launch, "repeat", None)
    if repeat is None or plan.first_row or problem.q is not arguments.q or problem.sinks is not arguments.sinks:
        return
    if (key := _cache_key(arguments)) is None:
        return
    if len(plan.cached_runs) >= CACHE_SIZE:
        plan.cached_runs.clear()
    q, k, v, out, lse = problem.q, problem.k, problem.v, problem.out, problem.lse
    extents = [(0, 0) if x is None else checks.extent(x) for x in (q, k, v, out, lse)]
    of_q, of_k, of_v, of_out, of_lse = (stop - start for start, stop in extents)
    plan.cached_runs[key] = CachedRun(
        repeat(problem),
        q.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype,
        (*out.shape, out.dtype),
        v.data_ptr() - k.data_ptr() if isinstance(arguments.kv_cache, Tensor) else 0,
        (of_q, of_k, of_v, of_out, of_lse),
        NARROW_ALIGNMENT if problem.features.half_aligned_kv else ALIGNMENT,
    )


def _cache_key(arguments: RunArguments) -> Any:
    """Return what equal runs have in common besides addresses; None for a run that must not be cached."""
    q, cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks, sf, head_scales = (
        arguments
    )
    if not isinstance(q, Tensor) or type(return_lse) is not bool:
        return None
    try:
        if isinstance(cache, Tensor):
            kv: Any = cache.shape, cache.stride(), cache.dtype, cache.device
        elif (type(cache) is tuple or type(cache) is list) and len(cache) == 2:
            k, v = cache
            if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
                return None
            kv = k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device
        else:
            return None
        key = q.shape, q.stride(), q.dtype, q.device, kv, return_lse
    except RuntimeError:  # a sparse tensor has no strides: the full path refuses it
        return None
    if q_scale is k_scale is v_scale is lse is enable_pdl is window_left is sinks is sf is head_scales is None:
        if out is None:
            return key
        if isinstance(out, Tensor):
            return key, buffer_key(out)
    if not all(x is None or isinstance(x, Tensor) for x in (out, lse, sinks)):
        return None
    numbers = q_scale, k_scale, v_scale, enable_pdl, window_left
    types = tuple(map(type, numbers))
    if not sf is head_scales is None or not PLAIN_TYPES.issuperset(types):
        return None
    return key, numbers, types, buffer_key(out), buffer_key(lse), buffer_key(sinks)


def buffer_key(buffer: Tensor | None) -> Any:
    """Return what equal buffers of callers have in common besides addresses."""
    return None if buffer is None else (buffer.shape, buffer.stride(), buffer.dtype, buffer.device)


def _sinks_qualify(sinks: Tensor) -> bool:
    """Tell whether sinks are no negative view and need no gradient, and on the CPU, as in every call, look at them."""
    if sinks.is_neg() or (sinks.requires_grad and is_grad_enabled()):
        return False
    return not sinks.is_cpu or bool((sinks < math.inf).all())


def outputs_qualify(
    spans: Sequence[int], starts: tuple[int, int, int], out: Any, lse: Any, protected: Sequence[MemoryRange] = ()
) -> bool:
    """Tell whether buffers of the caller are aligned, no negative views, need no gradient, and overlap nothing else.
    `spans`: bytes that q, k, v, out and lse cover; `starts`: addresses of q, k and v; `protected`: more memory.
    """
    (q, k, v), (of_q, of_k, of_v, of_out, of_lse) = starts, spans
    out_start = lse_start = 0
    if out is not None:
        out_start = out.data_ptr()
        if out_start % ALIGNMENT or out.is_neg() or out.requires_grad:
            return False
    if lse is not None:
        lse_start = lse.data_ptr()
        if lse.is_neg() or lse.requires_grad or (lse_start < out_start + of_out and out_start < lse_start + of_lse):
            return False
    for start, stop in ((out_start, out_start + of_out), (lse_start, lse_start + of_lse)):
        if (q < stop and start < q + of_q) or (k < stop and start < k + of_k) or (v < stop and start < v + of_v):
            return False
        for _, (other, end) in protected:
            if other < stop and start < end:
                return False
    return True
