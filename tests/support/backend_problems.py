"""Batch cases in the form that backends receive, without the wrappers' checks."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.dispatch.reference import ReferenceRun
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem
from tests.support.batch_case import BatchCase, call, make, plan_arguments, wrapper


@dataclass(frozen=True)
class Built:
    problem: BatchProblem
    lengths: BatchLengths
    limits: BatchLimits


def build(case: BatchCase) -> Built:
    """The problem that a backend gets for `case`."""
    inputs, seen = make(case), list[BatchProblem]()
    made = wrapper(case, backend="reference")
    made.plan(**plan_arguments(case, inputs))
    plan = made._planned()
    plan.launch = ReferenceRun(seen.append)
    call(case, inputs, made)
    (problem,) = seen
    return Built(problem, plan.lengths.host, plan.limits)
