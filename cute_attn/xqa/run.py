"""Run decode calls without a plan: like an earlier call, or after all checks.

The layers and the steps of a model call with tensors of the same layouts: such calls leave entries. Where values are
looked at, all checks do so in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_attn.dispatch import backends
from cute_attn.problem import DecodeProblem
from cute_attn.request import checks
from cute_attn.request.decode import DecodeCall, before_launch, decode_problem
from cute_attn.runtime import switches
from cute_attn.wrappers import calls
from cute_attn.wrappers.calls import Fire, Given

Result = Tensor | tuple[Tensor, Tensor]


def looks_at_values(device: torch.device) -> bool:
    """Tell whether calls look at lengths and page numbers: where that costs nothing or was asked for."""
    return device.type == "cpu" or switches.validates()


def run(*arguments: Any) -> Result:
    """Launch a call like an earlier one; check others in full, launch them and leave their entries.

    `arguments`: the fields of a `DecodeCall`, a record that only full checks need: making it takes 0.4 us.
    """
    (query, cache, workspace, tables, lengths, bounds, mask, sinks, scale, v_scale, block_scales, out, lse, bound,
     window_left, enable_pdl, q_len, o_scale, return_lse, kv_layout, backend, form) = arguments  # fmt: skip
    if type(bound) is not int or not 0 <= bound <= checks.LARGEST_INT:
        checks.at_least("max_seq_len", bound, 0)
    scales, roles, optional, on_cpu = calls.operands((scale, None, v_scale), sinks, None, None, block_scales)
    k = v = cache
    if not isinstance(cache, Tensor):
        if not isinstance(cache, tuple | list) or len(cache) != 2:
            return run_in_full(DecodeCall(*arguments))[2]  # which says what is wrong with the cache
        k, v = cache
    numbers = *scales, window_left, enable_pdl, q_len, o_scale, return_lse
    given: Given = query, k, v, out, lse, workspace, optional, (tables, lengths, bounds, mask, *on_cpu)
    key, _, entry = calls.NOT_FOUND
    if isinstance(query, Tensor) and not looks_at_values(query.device):
        key, _, entry = calls.find(calls.UNPLANNED, given, numbers, (kv_layout, backend, form, roles))
    if entry is not None and (found := calls.replay(entry, given, ())) is not None:
        return found if return_lse else found[0]
    problem, fire, result = run_in_full(DecodeCall(*arguments))
    if key is not None and calls.is_plain(numbers) and form.lse_layout == "NH":
        _enter(key, given, problem, fire, result)
    return result


def run_in_full(call: DecodeCall) -> tuple[DecodeProblem, Fire | None, Result]:
    """Check a call in full and run it. Return also what runs calls like it."""
    checks.choice("lse_layout", call.form.lse_layout, ("NH", "HN"))
    problem = decode_problem(call)
    before_launch(problem, call, looks_at_values(problem.q.device))
    fire = backends.run(problem, call.backend)
    out, lse = call.out, problem.lse
    if out is None:
        by_request = call.form.out_by_request and problem.qo_len > 1 and problem.qo_indptr is None
        out = problem.out.unflatten(0, (-1, problem.qo_len)) if by_request else problem.out
    if lse is not None and call.form.lse_layout == "HN":
        lse = lse.t().contiguous() if call.lse is None else call.lse.copy_(lse.t())
    if not call.return_lse:
        return problem, fire, out
    assert lse is not None
    return problem, fire, (out, lse)


def _enter(key: Any, given: Given, problem: DecodeProblem, fire: Fire | None, result: Result) -> None:
    """Leave the entry of a call that passed every check, if its launch reads its tensors as they are."""
    read = problem.block_tables, problem.seq_lens, problem.qo_indptr, problem.draft_mask
    for x, y in zip(given[7][:4], read, strict=True):
        if (x is None) != (y is None) or (x is not None and y is not None and x.data_ptr() != y.data_ptr()):
            return
    outputs = result if isinstance(result, tuple) else (result, None)
    offset = problem.scratch.partials - problem.scratch.counters
    calls.enter(calls.UNPLANNED, key, fire, given, problem, outputs, partials_offset=offset)
