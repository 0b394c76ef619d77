"""Calls like an earlier one: they check addresses alone, and launch.

The layers of a model, and its steps, call with tensors that differ in addresses only. So a call that passed every check
leaves an `Entry`, under the layouts of its tensors and its options. A later call that finds one looks at alignment,
gradients, negative views and shared memory, allocates its outputs and launches. Where it finds none, or an address does
not qualify, all checks say what is wrong, or make another entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, is_grad_enabled
from torch.autograd import forward_ad

from cute_attn.kernels.host.operands import Fire, Optional, optional_tensors
from cute_attn.problem import BatchProblem, Request
from cute_attn.request import checks
from cute_attn.request.single import ALIGNMENT, NARROW_ALIGNMENT

CACHE_SIZE = 512  # calls: prompts of any length must not fill memory
NO_HEADS = None, None, None
NONE: Optional = ()
PLAIN_TYPES = frozenset((float, int, bool, type(None)))  # options that hash by value
NOT_TENSORS = AttributeError, RuntimeError, TypeError, ValueError  # what keys of other arguments raise, and sparse ones

# The tensors of a call as the user gave them, or None: q, k, v (k itself, where one tensor holds keys and values), out,
# lse, an `Optional`, and of decode calls without a plan the workspace, which launches write, and what else they read.
Given = tuple[Any, Any, Any, Any, Any, Optional, tuple[Any, ...]]
Entries = dict[Any, "Entry"]
Outputs = tuple[Tensor, Any]  # out, and lse or None


class Entry(NamedTuple):
    """A call that passed every check, and how to launch calls like it."""

    fire: Fire
    like_q: bool  # out has q's shape and dtype, and q is contiguous
    out: tuple[tuple[int, ...], torch.dtype]  # shape and dtype
    lse: tuple[int, ...] | None  # shape of an lse that the call makes
    v_offset: int  # bytes from the address of the v that is given to that of the values
    kv_alignment: int  # bytes: the launch reads k and v at multiples of it
    spans: tuple[int, ...]  # bytes that q, k, v, out, lse, optional tensors and more cover; of k and v of a single
    per_key: tuple[int, int]  # ^ request those without keys, and here per key
    partials_offset: int = 0  # of decode calls without a plan: bytes from the workspace's address to partial results


def layout(x: Any) -> Any:
    """Return what tensors of equal calls have in common besides addresses."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def layouts(tensors: Iterable[Any]) -> Any:
    """Return `layout` of tensors whose alignment may decide which kernels read them."""
    return tuple(None if x is None else (*layout(x), x.data_ptr() % ALIGNMENT) for x in tensors)


def typed(numbers: Sequence[Any]) -> Any:
    """Return options whose values may be equal although their types differ (1, 1.0, True), with their types."""
    return tuple(map(type, numbers)), numbers


def is_plain(numbers: Sequence[Any]) -> bool:
    """Tell whether options cannot change their value."""
    return PLAIN_TYPES.issuperset(map(type, numbers))


def roles(
    scales: tuple[Any, ...], sinks: Any, mask: Any, head_scales: tuple[Any, ...] | None, block_scales: Any
) -> tuple[tuple[Any, ...], Optional]:
    """Return the scales that are numbers, with None for tensors, and the tensors of a call in the order of `Optional`.

    `scales`: those of q, k and v. `block_scales`: a pair, or one tensor with both on axis 1.
    """
    of_q, of_k, of_heads = head_scales or NO_HEADS
    q_scale, k_scale, v_scale = scales = tuple(map(_number, scales))
    plain = sinks is mask is block_scales is of_q is of_k is of_heads is None
    if plain and not (isinstance(q_scale, Tensor) or isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor)):
        return scales, ()
    of_scores = [x for x in (q_scale, k_scale) if isinstance(x, Tensor)]
    of_v = v_scale if isinstance(v_scale, Tensor) else None
    padding = (None,) * (2 - len(of_scores))
    pair = (None, None) if block_scales is None else block_scales
    if isinstance(pair, Tensor):
        pair = pair.unbind(1) if pair.dim() > 1 else ()
    elif not isinstance(pair, tuple | list):
        pair = (pair,)  # which no call has an entry for
    numbers = tuple([None if isinstance(x, Tensor) else x for x in scales])
    return numbers, (*of_scores, *padding, of_v, sinks, mask, of_q, of_k, of_heads, *pair)


def _number(scale: Any) -> Any:
    """Return the value of a scale on the CPU, which all checks read too; and any other scale as it is."""
    if not isinstance(scale, Tensor) or not scale.is_cpu or scale.layout is not torch.strided:
        return scale
    plain = scale.numel() == 1 and scale.is_floating_point() and not scale.requires_grad and not scale.is_neg()
    return scale.item() if plain else scale


def replay(
    entry: Entry, given: Given, rest: tuple[Any, ...], kv_len: int = 0, protected: Sequence[Any] = ()
) -> Outputs | None:
    """Launch a call like that of `entry` and return out and lse; None where an address does not qualify.

    `rest`: what the launch takes after the tensors; `protected`: names and addresses of memory that it must not write.
    """
    q, k, v, out, lse, optional, more = given
    fire, like_q, (shape, dtype), lse_shape, v_offset, kv_alignment, spans, per_key, _ = entry
    if forward_ad._current_level >= 0:  # all checks look for tangents
        return None
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr() + v_offset
    if q_at % ALIGNMENT or (k_at | v_at) % kv_alignment or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if optional or more or out is not None or lse is not None:
        if not _qualify(out, lse, optional, more):
            return None
        places = [q_at, k_at, v_at, *(0 if x is None else x.data_ptr() for x in (out, lse, *optional, *more))]
        if not _apart(places, spans, [kv_len * step for step in per_key], len(more), protected):
            return None
    if out is None:
        out = empty_like(q) if like_q else q.new_empty(shape, dtype=dtype)
    if lse is None and lse_shape is not None:
        lse = q.new_empty(lse_shape, dtype=torch.float32)
    tensors = (q, k, v, out, lse, optional) + rest  # noqa: RUF005  # in half of the time of unpacking
    fire(q_at, k_at, v_at, out.data_ptr(), 0 if lse is None else lse.data_ptr(), tensors)
    return out, lse


def _qualify(out: Any, lse: Any, optional: Optional, more: Sequence[Any]) -> bool:
    """Tell whether no buffer needs a gradient, no tensor is a negative view or needs one that is not computed, `out` is
    aligned, and sinks on the CPU, as in every call, are numbers that rows can have.
    """
    for x in (out, lse):
        if x is not None and (x.is_neg() or x.requires_grad):
            return False
    if out is not None and out.data_ptr() % ALIGNMENT:
        return False
    grad = is_grad_enabled()
    for x in (*optional, *more):
        if x is not None and (x.is_neg() or (grad and x.requires_grad)):
            return False
    sinks = optional[3] if optional else None
    return sinks is None or not sinks.is_cpu or bool((sinks < math.inf).all())


def _apart(
    places: Sequence[int], spans: Sequence[int], of_keys: Sequence[int], more: int, protected: Sequence[Any]
) -> bool:
    """Tell whether what a launch writes (out, lse, and a workspace, the first of the last `more`) lies apart from all
    else. `of_keys`: bytes of the keys of a single request, which `spans` of k and v do not count.
    """
    ends = [start + span for start, span in zip(places, spans, strict=True)]
    ends[1], ends[2] = ends[1] + of_keys[0], ends[2] + of_keys[1]
    written = [3, 4] if not more else [3, 4, len(places) - more]
    for i in written:
        start, end = places[i], ends[i]
        if not start:
            continue
        for j, (other, stop) in enumerate(zip(places, ends, strict=True)):
            if other < end and start < stop and j != i:
                return False
        for _, (other, stop) in protected:
            if other < end and start < stop:
                return False
    return True


def enter(
    entries: Entries,
    key: Any,
    fire: Fire | None,
    given: Given,
    problem: Request | BatchProblem,
    result: Outputs,
    per_key: tuple[int, int] = (0, 0),
    partials_offset: int = 0,
) -> None:
    """Leave the entry of a call that passed every check, unless it has no key, its backend looks at every call, or the
    launch reads copies in place of what the user gave. `result`: what such calls return.
    """
    q, _, v, _, lse_given, optional, more = given
    if key is None or fire is None or problem.q is not q or not _same(optional, optional_tensors(problem)):
        return
    out, lse = result
    if len(entries) >= CACHE_SIZE:
        entries.clear()
    covered = (problem.q, problem.k, problem.v, problem.out, problem.lse, *optional, *more)
    of_q, of_k, of_v, *others = (_span(x) for x in covered)
    keys = getattr(problem, "kv_len", 0)
    entries[key] = Entry(
        fire,
        q.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype,
        (tuple(out.shape), out.dtype),
        None if lse is None or lse_given is not None else tuple(lse.shape),
        problem.v.data_ptr() - v.data_ptr(),
        NARROW_ALIGNMENT if problem.features.half_aligned_kv else ALIGNMENT,
        (of_q, of_k - keys * per_key[0], of_v - keys * per_key[1], *others),
        per_key,
        partials_offset,
    )


def _same(given: Optional, read: Optional) -> bool:
    """Tell whether optional tensors of a call are read where the user has them."""
    if len(given) != len(read):
        return False
    pairs = zip(given, read, strict=True)
    return all(x is y or (x is not None and y is not None and x.data_ptr() == y.data_ptr()) for x, y in pairs)


def _span(x: Tensor | None) -> int:
    """Return the bytes that a tensor covers."""
    if x is None:
        return 0
    start, stop = checks.extent(x)
    return stop - start
