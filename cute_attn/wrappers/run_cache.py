"""A run like one before: all that is left to look at are addresses.

The layers of a model run one plan with tensors that differ in nothing else. So a run that passed every check leaves an
`Accepted` behind, by dtypes, shapes, strides, devices and options; a run that finds one hands its addresses to the
launch, after checking them. Whatever is not plainly alike takes the long way (`normalize_run`) again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, is_grad_enabled

from cute_attn.kernels.host.batch import Repeat
from cute_attn.problem import BatchProblem
from cute_attn.request import checks
from cute_attn.request.batch_run import Given, Plan
from cute_attn.request.single import ALIGNMENT

REMEMBERED = 256  # forms of a plan: scales that change in every run must not pile up
PLAIN = (float, int, bool, type(None))  # options that are what they compare equal to, if their types are equal too


class Accepted(NamedTuple):
    repeat: Repeat
    like_q: bool  # is out of q's form, without gaps?
    out: tuple[int, int, int, torch.dtype]  # its shape and dtype
    v_offset: int  # bytes from the address of k to that of v in a cache of one tensor
    spans: tuple[int, int, int, int, int]  # bytes that q, k, v, out and lse cover


def again(plan: Plan, given: Given) -> tuple[Tensor, Tensor | None] | None:
    """out and lse of a run like one before, or None: it is not known to be one, or not right."""
    found = plan.accepted.get(_form(given))
    if found is None:
        return None
    q, cache, out, lse = given[0], given[1], given[5], given[6]
    if isinstance(cache, Tensor):
        k = v = cache
        k_start = cache.data_ptr()
        v_start = k_start + found.v_offset
    else:
        k, v = cache
        k_start, v_start = k.data_ptr(), v.data_ptr()
    q_start = q.data_ptr()
    if (q_start | k_start | v_start) % ALIGNMENT:
        return None
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if not (out is lse is None or _apart(plan, found, (q_start, k_start, v_start), out, lse)):
        return None
    if out is None:
        rows, heads, head_dim, dtype = found.out
        out = empty_like(q) if found.like_q else q.new_empty(rows, heads, head_dim, dtype=dtype)
    if lse is None and given[7]:
        lse = q.new_empty(found.out[0], found.out[1], dtype=torch.float32)
    found.repeat(q_start, k_start, v_start, out.data_ptr(), 0 if lse is None else lse.data_ptr(), (q, k, v, out, lse))
    return out, lse


def remember(plan: Plan, given: Given, problem: BatchProblem) -> None:
    """Accept runs like this one from now on, if its tensors went to the launch as they were given."""
    repeat = getattr(plan.launch, "repeat", None)
    if repeat is None or plan.first_row or problem.q is not given[0] or (form := _form(given)) is None:
        return
    if len(plan.accepted) >= REMEMBERED:
        plan.accepted.clear()
    q, k, v, out, lse = problem.q, problem.k, problem.v, problem.out, problem.lse
    extents = [(0, 0) if x is None else checks.extent(x) for x in (q, k, v, out, lse)]
    of_q, of_k, of_v, of_out, of_lse = (stop - start for start, stop in extents)
    plan.accepted[form] = Accepted(
        repeat(problem),
        q.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype,
        (*out.shape, out.dtype),
        v.data_ptr() - k.data_ptr() if isinstance(given[1], Tensor) else 0,
        (of_q, of_k, of_v, of_out, of_lse),
    )


def _form(given: Given) -> Any:
    """What runs alike have equal; None for a run that is like no other."""
    q, cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks, sf, head_scales = given
    if not isinstance(q, Tensor) or type(return_lse) is not bool:
        return None
    if not all(buffer is None or isinstance(buffer, Tensor) for buffer in (out, lse)):
        return None
    if isinstance(cache, Tensor):
        kv: Any = cache.shape, cache.stride(), cache.dtype, cache.device
    elif (type(cache) is tuple or type(cache) is list) and len(cache) == 2:
        k, v = cache
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            return None
        kv = k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device
    else:
        return None
    form = q.shape, q.stride(), q.dtype, q.device, kv, return_lse
    if q_scale is k_scale is v_scale is out is lse is enable_pdl is window_left is sinks is sf is head_scales is None:
        return form
    numbers = q_scale, k_scale, v_scale, enable_pdl, window_left
    types = tuple(map(type, numbers))
    if not sinks is sf is head_scales is None or not all(kind in PLAIN for kind in types):
        return None
    return form, numbers, types, _buffer(out), _buffer(lse)


def _buffer(value: Tensor | None) -> Any:
    return None if value is None else (value.shape, value.stride(), value.dtype, value.device)


def _apart(plan: Plan, found: Accepted, starts: tuple[int, int, int], out: Any, lse: Any) -> bool:
    """Are the caller's buffers aligned, without gradients, and over nothing that the launch reads?"""
    of_q, of_k, of_v, of_out, of_lse = found.spans
    taken = [(start, start + span) for start, span in zip(starts, (of_q, of_k, of_v), strict=True)]
    taken += [extent for _, extent in plan.taken]
    for buffer, span in ((out, of_out), (lse, of_lse)):
        if buffer is None:
            continue
        start = buffer.data_ptr()
        stop = start + span
        if buffer is out and start % ALIGNMENT:
            return False
        if buffer.requires_grad or any(start < end and begin < stop for begin, end in taken):
            return False
        taken.append((start, stop))
    return True
