"""fa2 and persistent kernels on the same inputs, as `tests/gpu/test_cross.py`, on the emulator: some short problems."""

from __future__ import annotations

import pytest
import torch

from cute_attn.emulator import using
from tests.support import batch_case, case, cross
from tests.support.persistent_emulated import FA3, TARGETS, Target, name

pytestmark = pytest.mark.emulator

SEEDS = (0, cross.A_KERNEL)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_batches(target: Target, seed: int) -> None:
    problem = cross.batch(target, seed, max_len=150)
    inputs = batch_case.make(problem)
    answers = []
    for backend in cross.backends(target):
        with using(target.arch, kernels=backend, sms=2) as emulation:
            answers.append(batch_case.call(problem, inputs, backend="emulator"))
        assert {record.spec["kernel"] for record in emulation.records} - {"combine"} == {backend}
        result = batch_case.check(problem, inputs, *answers[-1])
        assert result.ok, f"{backend}: {result.detail}"
    assert cross.differences(problem, *answers) == ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_single_requests(target: Target, seed: int) -> None:
    problem = cross.single(target, seed, max_len=150)
    inputs = case.make(problem)
    answers = []
    for backend in cross.backends(target):
        with using(target.arch, kernels=backend, sms=2):
            answers.append(case.call(problem, inputs, backend="emulator"))
        result = case.check(problem, *answers[-1])
        assert result.ok, f"{backend}: {result.detail}"
    assert cross.differences(problem, *answers) == ""


def test_differences_are_seen() -> None:
    problem = cross.single(FA3, 0)
    out, lse = torch.zeros(4, 2, 64), torch.zeros(4, 2)
    empty = torch.full_like(lse, -torch.inf)
    assert cross.differences(problem, (out, empty), (out, empty)) == ""
    assert cross.differences(problem, (out, lse), (out + 0.1, lse)) == "out"
    assert cross.differences(problem, (out, lse), (out, lse + 0.1)) == "lse"
    assert cross.differences(problem, (out, lse), (out * torch.nan, empty)) == "out and lse"
