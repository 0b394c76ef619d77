"""Run decode calls without a plan: like an earlier call, or after all checks.

The layers and the steps of a model call with tensors of the same layouts: such calls leave entries. Where values are
looked at, all checks do so in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_attn.dispatch import backends
from cute_attn.errors import ArgumentError
from cute_attn.problem import DecodeProblem
from cute_attn.request import checks
from cute_attn.request.decode import (
    FIRST_NAME,
    FIRST_NUMBER,
    FIRST_READ,
    FIRST_SCALE,
    DecodeCall,
    before_launch,
    decode_problem,
)
from cute_attn.runtime import switches
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Fire, Given

Result = Tensor | tuple[Tensor, Tensor]

_entries: calls.Entries = {}


def forget() -> None:
    """Forget all calls."""
    _entries.clear()


def looks_at_values(device: torch.device) -> bool:
    """Tell whether calls look at lengths and page numbers: where that costs nothing or was asked for."""
    return device.type == "cpu" or switches.validates()


def run(call: DecodeCall) -> Result:
    """Launch a call like an earlier one; check others in full, launch them and leave their entries."""
    bound = call.max_seq_len
    if type(bound) is not int or not 0 <= bound <= checks.LARGEST_INT:
        call = call._replace(max_seq_len=_bound(bound))
    given, numbers, names = parts(call)
    key = key_of(given, numbers, names)
    try:
        entry = _entries.get(key)
    except TypeError:  # an option has no hash: all checks say what is wrong with it
        entry = None
    if entry is not None and given is not None and (found := calls.replay(entry, given, ())) is not None:
        return found if call.return_lse else found[0]
    problem, fire, result = run_in_full(call)
    if key is not None and given is not None and calls.is_plain(numbers) and call.lse_layout == "NH":
        _enter(key, given, problem, fire, result)
    return result


def run_in_full(call: DecodeCall) -> tuple[DecodeProblem, Fire | None, Result]:
    """Check a call in full and run it. Return also what runs calls like it."""
    problem = decode_problem(call)
    before_launch(problem, call, looks_at_values(problem.q.device))
    fire = backends.run(problem, call.backend)
    out, lse = call.out, problem.lse
    if out is None:
        by_request = call.out_by_request and problem.qo_len > 1 and problem.qo_indptr is None
        out = problem.out.unflatten(0, (-1, problem.qo_len)) if by_request else problem.out
    if lse is not None and call.lse_layout == "HN":
        lse = lse.t().contiguous() if call.lse is None else call.lse.copy_(lse.t())
    if not call.return_lse:
        return problem, fire, out
    assert lse is not None
    return problem, fire, (out, lse)


def parts(call: DecodeCall) -> tuple[Given | None, tuple[Any, ...], tuple[Any, ...]]:
    """Return the tensors of a call, None for a cache that is neither a tensor nor a pair; options whose values may be
    equal although their types differ; and all other options.
    """
    query, cache, block_scales, workspace, out, lse = call[:FIRST_READ]
    scales, roles, optional, numbers_read = calls.operands(
        (call.bmm1_scale, None, call.bmm2_scale), call.sinks, None, None, block_scales
    )
    numbers, names = scales + call[FIRST_NUMBER:FIRST_NAME], (roles, *call[FIRST_NAME:])
    read = call[FIRST_READ : FIRST_SCALE - 1] + numbers_read
    if isinstance(cache, Tensor):
        return (query, cache, cache, out, lse, workspace, optional, read), numbers, names
    if isinstance(cache, tuple | list) and len(cache) == 2:
        return (query, *cache, out, lse, workspace, optional, read), numbers, names
    return None, numbers, names


def key_of(given: Given | None, numbers: tuple[Any, ...], names: tuple[Any, ...]) -> Any:
    """Return what equal calls have in common besides addresses; None for a call that all checks must look at."""
    if given is None:
        return None
    q, k, v, out, lse, workspace, optional, read = given
    try:
        if looks_at_values(q.device):
            return None
        tensors = q, k, None if k is v else v, out, workspace, *read
        # `layout` of each, without its call
        of = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
        key = of, tuple(map(type, numbers)), numbers, names
        return (key, calls.layout(lse), calls.layouts(optional)) if optional or lse is not None else key
    except calls.NOT_TENSORS:
        return None


def _enter(key: Any, given: Given, problem: DecodeProblem, fire: Fire | None, result: Result) -> None:
    """Leave the entry of a call that passed every check, if its launch reads its tensors as they are."""
    read = problem.block_tables, problem.seq_lens, problem.qo_indptr, problem.draft_mask
    for x, y in zip(given[7][:4], read, strict=True):
        if (x is None) != (y is None) or (x is not None and y is not None and x.data_ptr() != y.data_ptr()):
            return
    out, lse = result if isinstance(result, tuple) else (result, None)
    scratch = problem.scratch
    calls.enter(_entries, key, fire, given, problem, (out, lse), partials_offset=scratch.partials - scratch.counters)


def _bound(max_seq_len: Any) -> int:
    bound = checks.integer("max_seq_len", max_seq_len)
    if bound < 0:
        raise ArgumentError(f"max_seq_len must be >= 0, got {bound}")
    return bound
