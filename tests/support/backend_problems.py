"""Batch cases in the form that backends receive, without the wrappers' checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cute_attn.dispatch.reference import ReferenceRun
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem
from tests.support.batch_case import BatchCase, BatchInputs, call, check, make, plan_arguments, wrapper


@dataclass(frozen=True)
class Built:
    case: BatchCase
    inputs: BatchInputs
    problem: BatchProblem
    lengths: BatchLengths
    limits: BatchLimits

    def wrong(self, case: BatchCase | None = None) -> str:
        """What is wrong with the outputs once the problem is solved, as numbers of `case`."""
        return check(case or self.case, self.inputs, self.problem.out, self.problem.lse).detail


def build(case: BatchCase) -> Built:
    """The problem that a backend gets for `case`, with NaN in its outputs."""
    inputs, seen = make(case), list[BatchProblem]()
    made = wrapper(case, backend="reference")
    made.plan(**plan_arguments(case, inputs))
    plan = made._planned()
    plan.launch = ReferenceRun(seen.append)
    call(case, inputs, made)
    (problem,) = seen
    for buffer in (problem.out, problem.lse):
        if buffer is not None:
            buffer.fill_(math.nan)
    return Built(case, inputs, problem, plan.lengths.host, plan.limits)
