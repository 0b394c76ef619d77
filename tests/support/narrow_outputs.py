"""Outputs in fp8: cases, and the exact expectation: what the same kernel writes in fp32, rounded once."""

from __future__ import annotations

import dataclasses

import torch

from tests.support.batch_case import BatchCase, dims, heads, paged, ragged
from tests.support.matrix import BF16, CAUSAL, E4M3, PACKED, prefill
from tests.support.right import Solver

NARROW = {"o_dtype": "float8_e4m3fn"}
NARROW_5 = {"o_dtype": "float8_e5m2"}

# v_scale 300: outputs beyond the largest number of e4m3, which they become.
PROBLEMS: tuple[BatchCase, ...] = (
    ragged((3, 20), (300, 60), fixed_split_size=128, **NARROW, **heads(2, 1)),  # keys are split
    paged((70, 9), (60, 140), page_size=3, sinks=True, v_scale=-1.25, **NARROW_5, **dims(112)),
    prefill(70, 150, (2, 1), 128, **BF16, **CAUSAL, **NARROW, v_scale=300.0),
    prefill(70, 150, (2, 1), 64, **NARROW_5),
    prefill(70, 100, (1, 1), 80, **CAUSAL, **NARROW),
    prefill(70, 100, (1, 1), 256, **PACKED, **BF16, **NARROW_5),
    prefill(70, 100, (1, 1), 128, **BF16, **E4M3, **CAUSAL, **NARROW),
    prefill(3, 500, (2, 1), 128, **CAUSAL, **NARROW),  # few rows: keys are split
    # q, k and v in fp8, whose accumulators hold even and odd dimensions apart
    ragged((140, 9), (200, 60), mask="causal", dtype="float8_e4m3fn", **NARROW, **heads(2, 1)),
    ragged((140, 9), (200, 60), mask="causal", dtype="float8_e4m3fn", **NARROW_5, **heads(2, 1), **dims(80)),
)


def assert_rounded(problem: BatchCase, device: str, backend: str) -> None:
    """The output is right, and the fp32 output of the same kernel rounded to nearest even and saturated."""
    beyond = problem.v_scale == 300.0
    solver = Solver(problem, device, backend=backend)
    out, lse = solver.call() if beyond else solver.assert_right()
    wide, wide_lse = Solver(dataclasses.replace(problem, o_dtype="float32"), device, backend=backend).call()
    largest = torch.finfo(out.dtype).max
    assert not beyond or float(wide.abs().max()) > largest
    assert torch.equal(wide.clamp(-largest, largest).to(out.dtype).view(torch.uint8), out.view(torch.uint8))
    assert (lse is None and wide_lse is None) or torch.equal(lse, wide_lse)
