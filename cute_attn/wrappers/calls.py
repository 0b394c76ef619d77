"""Calls like an earlier one: they check addresses alone, and launch.

The layers of a model, and its steps, call with tensors that differ in addresses only. So a call that passed every check
leaves an `Entry`, under the layouts of its tensors and its options. A later call that finds one looks at alignment,
gradients, negative views and shared memory, allocates its outputs and launches. Where it finds none, or an address does
not qualify, all checks say what is wrong, or make another entry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, empty_like, is_grad_enabled, is_inference_mode_enabled
from torch.autograd import forward_ad

from cute_attn.dispatch import backends
from cute_attn.kernels.host.operands import MASK, ROLES, Fire, Optional, Roles, optional_tensors
from cute_attn.problem import BatchPlan, BatchProblem, Problem, Request
from cute_attn.request import bit_packing, checks, single
from cute_attn.request.batch_run import LseForm, RunArguments, protected_memory
from cute_attn.request.mla import MlaProblem
from cute_attn.request.operands import ALIGNMENT, NARROW_ALIGNMENT
from cute_attn.request.settings import MAX_KV_LEN, Call
from cute_attn.runtime import switches
from cute_attn.runtime.staging import is_capturing

CACHE_SIZE = 512  # calls: prompts of any length must not fill memory
NO_HEADS = None, None, None
PLAIN_TYPES = frozenset((float, int, bool, type(None)))  # of numbers
OPTION_TYPES = PLAIN_TYPES | {str, torch.dtype}  # options that hash by value, as tuples of them do
# What keys of arguments that are no tensors raise, and sparse ones.
NOT_TENSORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
V_SCALE, SINKS, K_SCALES = map(ROLES.index, ("v_scale_ptr", "sinks", "k_scales"))

# The tensors of a call as the user gave them, or None: q, k, v (k itself, where one tensor holds keys and values), out,
# lse, a workspace of the call, those of `operands.Optional` that there are, what else the call reads, and a workspace
# for counters alone.
Given = tuple[Any, Any, Any, Any, Any, Any, Optional, tuple[Any, ...], Any]
Numbers = tuple[Any, ...]  # options whose values may be equal although their types differ (1, 1.0, True)
Entries = dict[Any, "Entry"]
Outputs = tuple[Tensor, Any]  # out, and lse or None
Range = tuple[int, int]  # addresses of the first byte and past the last
# From q and optional tensors to those that a launch reads; None: all checks must look at the call.
Before = Callable[[Any, Optional], tuple[Any, Optional] | None]
Convert = Callable[[Tensor, Any], Tensor]  # from the lse of a launch and the caller's, or None, to what is returned
NONE: tuple[Roles, Optional, tuple[Any, ...]] = (), (), ()
NOT_FOUND = None, None
RunCall = tuple[Any, Given | None]  # what equal runs have in common besides addresses, and the tensors; None: no entry
NO_CALL: RunCall = (None, None)

UNPLANNED: Entries = {}  # of calls without a plan; plans have entries of their own


@dataclass(slots=True)
class Entry:
    """A call that passed every check, and how to launch calls like it."""

    fire: Fire
    like_q: bool  # out has q's shape and dtype, and q is contiguous
    out: tuple[int, ...]  # shape
    o_dtype: torch.dtype
    lse: tuple[int, ...] | None  # shape of an lse that the call makes
    v_offset: int  # bytes from the address of the v that is given to that of the values
    kv_alignment: int  # bytes: the launch reads k and v at multiples of it
    spans: tuple[int, ...]  # bytes that q, k, v, out, lse and workspaces cover; of k and v of a single request those
    per_key: tuple[int, int]  # ^ without keys, and here per key
    other_spans: tuple[int, ...]  # bytes that optional tensors cover, and what else is read
    partials_offset: int  # bytes from the workspace's address to partial results
    launched_read: int  # of what else is read, the first tensors: the launch takes their addresses
    before: Before | None  # makes what the launch reads in place of what is given, and looks at values
    convert: Convert | None  # makes the lse that the call returns


def repeated(
    entries: Entries,
    given: Given,
    numbers: Numbers,
    names: tuple[Any, ...],
    keys_axis: int | None = None,
    any_keys: bool = True,
) -> tuple[Any, Outputs | None]:
    """Launch a call like an earlier one, and return its outputs; None if there is none, or an address does not qualify.
    Return first the key under which the call may leave its entry: what equal calls have in common besides addresses.

    `names`: all options that are not `numbers`. `keys_axis`: that of the keys of a single request, whose entry serves
    any number of them with `any_keys`, as the next token comes with one key more; None where lengths stay on the
    device. The key is None for a call that all checks must look at, as they do at those of less than 2 keys: the stride
    of one key may be any.
    """
    q, k, v, out, lse, workspace, optional, read, counters = given
    try:
        kv_len, of_k, of_v = 0, k.shape, v.shape
        if keys_axis is None:
            if looks_at_values(q.device):
                return NOT_FOUND
        else:
            (kv_len, heads, dim), (v_len, v_heads, v_dim) = of_k, of_v
            if keys_axis:
                kv_len, heads, v_len, v_heads = heads, kv_len, v_heads, v_len
            if not 2 <= kv_len <= MAX_KV_LEN or v_len != kv_len:
                return NOT_FOUND
            if any_keys:
                of_k, of_v = (heads, dim), (v_heads, v_dim)
        v_layout = None if v is k else (of_v, v.stride(), v.dtype, v.device)
        key: Any = (
            q.shape, q.stride(), q.dtype, q.device, of_k, k.stride(), k.dtype, k.device, v_layout, interned(*numbers),
            names,
        )  # fmt: skip
        if out is not None:  # aligned or not: `replay` looks
            key = key, out.shape, out.stride(), out.dtype, out.device
        if optional or read or not lse is workspace is None:
            key = key, layouts((lse, workspace, counters, *optional, *read))
        entry = entries.get(key)
    except NOT_TENSORS:  # or options that have no hash
        return NOT_FOUND
    return key, None if entry is None else replay(entry, given, () if keys_axis is None else (kv_len,), kv_len)


def layouts(tensors: Iterable[Any]) -> Any:
    """Return what tensors of equal calls have in common besides addresses, alignment included: it may decide
    which kernels read them.
    """
    return tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT) for x in tensors]
    )


@functools.lru_cache(CACHE_SIZE, typed=True)
def interned(*numbers: Any) -> object:
    """Return an object that stands for options whose values may be equal although their types differ (1, 1.0, True): in
    keys it is compared in no time. A TypeError for options that may change their value.
    """
    if not all(type(x) in OPTION_TYPES for option in numbers for x in (option if type(option) is tuple else (option,))):
        raise TypeError("calls with such options are not alike")
    return object()


def operands(
    scales: tuple[Any, ...], sinks: Any, mask: Any, head_scales: tuple[Any, ...] | None, block_scales: Any
) -> tuple[tuple[Any, ...], Roles, Optional, tuple[Tensor, ...]]:
    """Return the scales that are numbers, with None for tensors on a GPU, which optional tensors a call has, these, and
    the scales that are tensors on the CPU, whose values are numbers too.

    `scales`: those of q, k and v. `block_scales`: a pair, or one tensor with both on axis 1.
    """
    q, k, v = scales
    if (
        type(q) in PLAIN_TYPES
        and type(k) in PLAIN_TYPES
        and type(v) in PLAIN_TYPES
        and head_scales is block_scales is None
    ):
        if mask is None:
            return (scales, (), (), ()) if sinks is None else (scales, (SINKS,), (sinks,), ())
        return (scales, (MASK,), (mask,), ()) if sinks is None else (scales, (SINKS, MASK), (sinks, mask), ())
    numbers: list[Any] = []
    roles: list[int] = []
    optional: list[Any] = []
    read: list[Tensor] = []
    for x in scales:
        if not isinstance(x, Tensor):
            numbers.append(x)
        elif _is_number(x):
            numbers.append(x.item())
            read.append(x)
        else:
            roles.append(V_SCALE if len(numbers) == 2 else len(roles))
            optional.append(x)
            numbers.append(None)
    for role, x in enumerate((sinks, mask, *(head_scales or NO_HEADS)), SINKS):
        if x is not None:
            roles.append(role)
            optional.append(x)
    if block_scales is not None:
        if isinstance(block_scales, Tensor) and block_scales.dim() > 1 and block_scales.shape[1] == 2:
            block_scales = block_scales, block_scales.select(1, 1)
        roles += K_SCALES, K_SCALES + 1
        optional += block_scales if isinstance(block_scales, tuple | list) else (block_scales,)
    return tuple(numbers), tuple(roles), tuple(optional), tuple(read)


def _is_number(x: Tensor) -> bool:
    """Tell whether a scale is a tensor on the CPU that all checks read."""
    stored = x.is_cpu and x.layout is torch.strided and not x.is_neg()
    return stored and x.numel() == 1 and x.is_floating_point() and not (x.requires_grad and is_grad_enabled())


def replay(
    entry: Entry, given: Given, rest: tuple[Any, ...], kv_len: int = 0, protected: Iterable[Range] = ()
) -> Outputs | None:
    """Launch a call like that of `entry` and return out and lse; None where an address does not qualify.

    `rest`: what the launch takes after the tensors; in a workspace of the call addresses. Those of `read` follow it.
    `protected`: memory that the launch must not write.
    """
    q, k, v, out, lse, workspace, optional, read, counters = given
    if forward_ad._current_level >= 0:  # all checks look for tangents
        return None
    grad, q_at, k_at, v_at = is_grad_enabled(), q.data_ptr(), k.data_ptr(), entry.v_offset
    if q.is_neg() or k.is_neg() or (grad and (q.requires_grad or k.requires_grad)):
        return None
    if v is k:
        v_at += k_at
    else:
        v_at += v.data_ptr()
        if v.is_neg() or (grad and v.requires_grad):
            return None
    if q_at % ALIGNMENT or (k_at | v_at) % entry.kv_alignment:
        return None
    for x in optional:
        if x.is_neg() or (grad and x.requires_grad):
            return None
    if out is not None or lse is not None or workspace is not None:
        of_q, of_k, of_v, of_out, of_lse, of_workspace, of_counters = entry.spans
        per_k, per_v = entry.per_key
        k_end, v_end = k_at + of_k + kv_len * per_k, v_at + of_v + kv_len * per_v
        apart = [*protected, (q_at, q_at + of_q), (k_at, k_end), (v_at, v_end)]
        starts, spans = [], iter(entry.other_spans)  # `zip` that is strict takes twice the time
        for x in optional + read:
            start, span = 0, next(spans)
            if x is not None:
                if x.is_neg():
                    return None
                start = x.data_ptr()
                apart.append((start, start + span))
            starts.append(start)
        if workspace is not None:
            if not _is_apart(workspace, of_workspace, ALIGNMENT, apart):
                return None
            partials = counted_at = workspace.data_ptr()
            if counters is not None:
                if not _is_apart(counters, of_counters, ALIGNMENT, apart):
                    return None
                counted_at = counters.data_ptr()
            rest = counted_at, partials + entry.partials_offset
        if entry.launched_read:
            rest = (*rest, *starts[len(optional) : len(optional) + entry.launched_read])
        if out is not None and not _is_apart(out, of_out, ALIGNMENT, apart):
            return None
        if lse is not None and not _is_apart(lse, of_lse, 1, apart):
            return None
    if entry.before is not None:
        launched = entry.before(q, optional)
        if launched is None:
            return None
        q, optional = launched
        q_at = q.data_ptr()
    if out is None:
        out = empty_like(q) if entry.like_q else q.new_empty(*entry.out, dtype=entry.o_dtype)
    if entry.lse is not None:
        lse = q.new_empty(*entry.lse, dtype=torch.float32)  # sizes one by one take 0.4 us less
    tensors = (q, k, v, out, lse, optional) + rest  # noqa: RUF005  # in half of the time of unpacking
    entry.fire(q_at, k_at, v_at, out.data_ptr(), 0 if lse is None else lse.data_ptr(), tensors)
    return out, lse if entry.convert is None else entry.convert(lse, given[4])


def _is_apart(x: Tensor, span: int, alignment: int, apart: list[Range]) -> bool:
    """Tell whether memory that a launch writes is aligned, no negative view, needs no gradient, may be written outside
    of inference mode, and lies apart from what is listed in `apart`, where it is then listed too.
    """
    start = x.data_ptr()
    end = start + span
    if start % alignment or x.is_neg() or x.requires_grad or (x.is_inference() and not is_inference_mode_enabled()):
        return False
    for other, stop in apart:
        if other < end and start < stop:
            return False
    apart.append((start, end))
    return True


def looks_at_values(device: torch.device) -> bool:
    """Tell whether calls look at lengths and page numbers: where it costs nothing or was asked for, not in captures."""
    return device.type == "cpu" or (switches.validates() and not is_capturing(device))


def run_single(call: Call, backend: Any, key: Any, given: Given) -> Tensor | tuple[Tensor, Tensor]:
    """Check and launch a call of a single request, and leave its entry. `key`: what `repeated` returned of it."""
    problem = single.problem(call)
    fire = backends.run(problem, backend)
    out, lse = problem.out, problem.lse
    if key is not None:
        axis = int(call.kv_layout == "HND")
        of_k, of_v = (x.stride(axis) * x.element_size() for x in (problem.k, problem.v))
        before = None
        if call.custom_mask is not None and call.packed_custom_mask is None:
            before = functools.partial(_pack_mask, optional_tensors(problem)[0].index(MASK))
        enter(UNPLANNED, key, fire, given, problem, (out, lse), (of_k, of_v), before=before)
    if call.return_lse:
        assert lse is not None
        return out, lse
    return out


def _pack_mask(place: int, q: Tensor, optional: Optional) -> tuple[Tensor, Optional]:
    """Return the tensors of a launch whose mask is given as booleans."""
    return q, (*optional[:place], bit_packing.mask_bits(optional[place]), *optional[place + 1 :])


def _check_sinks(place: int, before: Before | None, q: Tensor, optional: Optional) -> tuple[Tensor, Optional] | None:
    """Return the tensors of a launch that `before` makes, whose sinks are on the CPU, if these are finite or -inf."""
    launched = (q, optional) if before is None else before(q, optional)
    return launched if launched is None or bool((launched[1][place] < math.inf).all()) else None


def lse_in_form(factor: float, by_heads: bool, lse: Tensor, buffer: Tensor | None) -> Tensor:
    """Return the lse of a launch, `[rows, num_qo_heads]`, times a factor. `by_heads`: as `[num_qo_heads, rows]`, in the
    caller's buffer if there is one.
    """
    if not by_heads:
        return lse.mul_(factor)
    return torch.mul(lse.t(), factor, out=lse.new_empty(lse.shape[::-1]) if buffer is None else buffer)


def enter(
    entries: Entries,
    key: Any,
    fire: Fire | None,
    given: Given,
    problem: Request | BatchProblem | MlaProblem,
    result: Outputs,
    per_key: tuple[int, int] = (0, 0),
    partials_offset: int = 0,
    launched_read: Sequence[Tensor | None] = (),
    before: Before | None = None,
    convert: Convert | None = None,
) -> None:
    """Leave the entry of a call that passed every check, unless it has no key, its backend looks at every call, or the
    launch reads copies in place of what the user gave, which `before` does not make. That is told by addresses, so that
    views of q qualify, whatever their storage offsets are. `result`: what such calls return, but for `convert`.
    `launched_read`: what the launch reads in place of the first tensors among what else the call reads.
    """
    if key is None or fire is None:
        return
    q, k, v, _, lse_given, workspace, optional, read, counters = given
    roles, launched = optional_tensors(problem)
    if SINKS in roles and q.is_cpu:
        before = functools.partial(_check_sinks, roles.index(SINKS), before)
    of_launch = (q, optional) if before is None else before(q, optional)
    if of_launch is None:
        return
    made = {id(x) for x in (of_launch[0], *of_launch[1])}.difference(map(id, (q, *optional)))
    theirs = of_launch[0], k, *of_launch[1], *read[: len(launched_read)]
    own = problem.q, problem.k, *launched, *launched_read
    for x, y in zip(theirs, own, strict=True):
        if (x.stride() != y.stride()) if y is not None and id(x) in made else (_address(x) != _address(y)):
            return
    if v.untyped_storage().data_ptr() != problem.v.untyped_storage().data_ptr():
        return
    out, lse = result
    if len(entries) >= CACHE_SIZE:
        entries.clear()
    of_q, of_k, of_v, *others = map(_span, (q, problem.k, problem.v, problem.out, problem.lse, workspace, counters))
    keys = problem.kv_len if isinstance(problem, Problem) else 0
    narrow = not isinstance(problem, MlaProblem) and problem.settings.features.half_aligned_kv
    entries[key] = Entry(
        fire,
        q.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype,
        tuple(out.shape),
        out.dtype,
        None if lse is None or (lse_given is not None and (convert is None or lse is lse_given)) else tuple(lse.shape),
        problem.v.data_ptr() - v.data_ptr() if problem.v.numel() else 0,  # which no launch reads
        NARROW_ALIGNMENT if narrow else ALIGNMENT,
        (of_q, of_k - keys * per_key[0], of_v - keys * per_key[1], *others),
        per_key,
        tuple(map(_span, optional + read)),
        partials_offset,
        len(launched_read),
        before,
        convert,
    )


def enter_append(
    key: Any, fire: Fire | None, given: Given | None, written: Sequence[Tensor], launched_read: int
) -> None:
    """Leave the entry of a call that wrote rows to caches. They are out and lse of `given`, or out alone, which then
    begins where k does, and block scales the workspaces. `written`: caches and block scales, k and v of each.
    """
    if key is None or given is None or fire is None:
        return
    q, k, v, out, lse, _, optional, read, counters = given
    if any(x.itemsize < 4 for x in read[:launched_read]) or any(x.data_ptr() % ALIGNMENT for x in (q, k, out)):
        return  # the launch reads copies, or by accesses that are narrower than those of calls alike
    if len(UNPLANNED) >= CACHE_SIZE:
        UNPLANNED.clear()
    starts, ends = zip(*map(checks.extent, written), strict=True)
    of_out, of_workspace = (ends[i + (x is None)] - starts[i] for i, x in ((0, lse), (-2, counters)))
    spans = *map(_span, (q, k, v)), of_out, _span(lse), of_workspace, _span(counters)
    others = tuple(map(_span, optional + read))
    UNPLANNED[key] = Entry(
        fire, False, (), out.dtype, None, 0, ALIGNMENT, spans, (0, 0), others, 0, launched_read, None, None
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _span(x: Tensor | None) -> int:
    """Return the bytes that a tensor covers."""
    if x is None:
        return 0
    start, stop = checks.extent(x)
    return stop - start


# ---- runs of plans: the layers of a model run one plan with tensors of the same layouts


def call_of_run(plan: BatchPlan, arguments: RunArguments, lse_form: LseForm | None = None) -> RunCall:
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
            key = key, layouts((mask,)), interned(*windows)
        if lse_form is not None:
            hash(lse_form)
            key = key, lse_form
        if q_scale is k_scale is v_scale is enable_pdl is window_left is sf is heads is None:
            optional: tuple[Any, ...] = () if mask is None else (mask,)
            if sinks is not None:
                key, optional = (key, layouts((sinks,))), (sinks, *optional)
            if out is not None:  # aligned or not: `replay` looks
                key = key, out.shape, out.stride(), out.dtype, out.device
            if lse is not None:
                key = key, "lse", layouts((lse,))
            return key, (q, k, v, out, lse, None, optional, (), None)
        if heads is not None and len(heads) != 3:  # which is refused
            return NO_CALL
        scales, roles, optional, read = operands((q_scale, k_scale, v_scale), sinks, mask, heads, sf)
        numbers = interned(*scales, enable_pdl, window_left)
        key = key, numbers, roles
        if optional or read or not out is lse is None:
            key = key, layouts((out, lse, *optional, *read))
        return key, (q, k, v, out, lse, None, optional, read, None)
    except NOT_TENSORS:
        return NO_CALL


def run(wrapper: Any, arguments: RunArguments, lse_form: LseForm | None = None, call: RunCall | None = None) -> Any:
    """Run the plan in force of a `BatchWrapper`, whose method this is, and return out, or out and lse. `call`: under
    which runs like this one are found, if not by its arguments.
    """
    plan = wrapper._plan
    if plan is None or (batch := plan.batch) is None or wrapper._copies:
        plan = wrapper._in_force()
        if plan.is_open:
            return wrapper._first_run(arguments, lse_form)
        batch = wrapper._scheduled(plan)
    if call is None:
        call = call_of_run(batch, arguments, lse_form)
    out, lse = replay_run(batch, call) or wrapper._checked_run(plan, arguments, call, lse_form)
    return out if lse is None or not arguments.return_lse else (out, lse)


def replay_run(plan: BatchPlan, call: RunCall) -> Outputs | None:
    """Launch a run like an earlier one; None if there is none, or an address does not qualify."""
    key, given = call
    entry = plan.cached_runs.get(key)
    if entry is None or given is None:
        return None
    protected = () if given[3] is given[4] is None else plan.protected or protected_memory(plan)
    return replay(entry, given, (plan.lengths.kv_indices, plan.workspace), 0, protected)
