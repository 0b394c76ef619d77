"""fa2 and fa3 on the same inputs, as in `tests/gpu/test_cross.py`, on the emulator: a few short problems."""

from __future__ import annotations

import pytest
import torch

from cute_attn.emulator import using
from tests.support import batch_case, case, cross

pytestmark = pytest.mark.emulator

SEEDS = (0, cross.A_KERNEL)


@pytest.mark.parametrize("seed", SEEDS)
def test_batches(seed: int) -> None:
    problem = cross.batch(seed, max_len=150)
    inputs = batch_case.make(problem)
    answers = []
    for backend in cross.BACKENDS:
        with using("sm_90a", kernels=backend, sms=2) as emulation:
            answers.append(batch_case.call(problem, inputs, backend="emulator"))
        assert {record.spec["kernel"] for record in emulation.records} - {"combine"} == {backend}
        result = batch_case.check(problem, inputs, *answers[-1])
        assert result.ok, f"{backend}: {result.detail}"
    assert cross.differences(problem, *answers) == ""


@pytest.mark.parametrize("seed", SEEDS)
def test_single_requests(seed: int) -> None:
    problem = cross.single(seed, max_len=150)
    inputs = case.make(problem)
    answers = []
    for backend in cross.BACKENDS:
        with using("sm_90a", kernels=backend, sms=2):
            answers.append(case.call(problem, inputs, backend="emulator"))
        result = case.check(problem, *answers[-1])
        assert result.ok, f"{backend}: {result.detail}"
    assert cross.differences(problem, *answers) == ""


def test_differences_are_seen() -> None:
    problem = cross.single(0)
    out, lse = torch.zeros(4, 2, 64), torch.zeros(4, 2)
    empty = torch.full_like(lse, -torch.inf)
    assert cross.differences(problem, (out, empty), (out, empty)) == ""
    assert cross.differences(problem, (out, lse), (out + 0.1, lse)) == "out"
    assert cross.differences(problem, (out, lse), (out, lse + 0.1)) == "lse"
    assert cross.differences(problem, (out, lse), (out * torch.nan, empty)) == "out and lse"
