"""Runs of wrappers: entries of a plan, for the layers of a model run one plan with tensors of the same layouts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_attn.problem import BatchPlan, BatchProblem
from cute_attn.request.batch_run import RunArguments, protected_memory
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Fire, Given, Outputs, layout, layouts

Call = tuple[Any, Given | None]  # what equal runs have in common besides addresses, and the tensors; None: no entry
NO_CALL: Call = (None, None)


def call_of(plan: BatchPlan, arguments: RunArguments) -> Call:
    """Return the key and the tensors of a run."""
    q, cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks, sf, heads, ranges = (
        arguments
    )
    if type(return_lse) is not bool:
        return NO_CALL
    try:
        if isinstance(cache, Tensor):
            k = v = cache
            kv: Any = cache.shape, cache.stride(), cache.dtype, cache.device
        else:
            k, v = cache
            kv = k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device
        key: Any = q.shape, q.stride(), q.dtype, q.device, kv, return_lse
        mask = plan.packed_mask  # the same in all runs of a plan
        if ranges is not None:
            mask, *windows = ranges
            if not calls.is_plain(windows):
                return NO_CALL
            key = key, layouts((mask,)), calls.typed(tuple(windows))
        if q_scale is k_scale is v_scale is enable_pdl is window_left is sf is heads is None:
            optional: tuple[Any, ...] = () if mask is None else (mask,)
            if sinks is not None:
                key, optional = (key, layouts((sinks,))), (sinks, *optional)
            if not out is lse is None:
                key = key, layout(out), layout(lse)
            return key, (q, k, v, out, lse, None, optional, ())
        scales, roles, optional, read = calls.operands((q_scale, k_scale, v_scale), sinks, mask, heads, sf)
        numbers = *scales, enable_pdl, window_left
        if not calls.is_plain(numbers):
            return NO_CALL
        key = key, calls.typed(numbers), roles, layout(out), layout(lse), layouts(optional + read)
        return key, (q, k, v, out, lse, None, optional, read)
    except calls.NOT_TENSORS:
        return NO_CALL


def try_replay(plan: BatchPlan, call: Call) -> Outputs | None:
    """Launch a run like an earlier one; None if there is none, or an address does not qualify."""
    key, given = call
    entry = plan.cached_runs.get(key)
    if entry is None or given is None:
        return None
    protected = () if given[3] is given[4] is None else plan.protected or protected_memory(plan)
    return calls.replay(entry, given, (plan.lengths.kv_indices, plan.workspace), protected=protected)


def enter(plan: BatchPlan, call: Call, fire: Fire | None, problem: BatchProblem) -> None:
    """Leave the entry of a run that passed every check."""
    key, given = call
    if given is not None and not plan.lengths.first_row:  # rows before it are filled, which a launch does not
        calls.enter(plan.cached_runs, key, fire, given, problem, (problem.out, problem.lse))
