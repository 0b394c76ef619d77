"""fa2 and persistent kernels on the same inputs, as `tests/gpu/test_cross.py`, on the emulator: some short problems."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_attn.emulator import using
from tests.support import cross
from tests.support.batch_case import BatchCase
from tests.support.case import Case
from tests.support.persistent_emulated import FA3, TARGETS, Target, name
from tests.support.right import Solver

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("draw", [cross.batch, cross.single], ids=["batch", "single"])
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_backends_agree(target: Target, draw: Callable[..., Case | BatchCase]) -> None:
    problem, answers = draw(target, 0, max_len=150), []
    for backend in cross.backends(target):
        with using(target.arch, kernels=backend, sms=2) as emulation:
            answers.append(Solver(problem, backend="emulator").assert_right())
        assert {record.spec["kernel"] for record in emulation.records} - {"combine"} == {backend}
    assert cross.differences(problem, *answers) == ""


def test_differences_are_seen() -> None:
    problem = cross.single(FA3, 0)
    out, lse = torch.zeros(4, 2, 64), torch.zeros(4, 2)
    empty = torch.full_like(lse, -torch.inf)
    assert cross.differences(problem, (out, empty), (out, empty)) == ""
    assert cross.differences(problem, (out, lse), (out + 0.1, lse)) == "out"
    assert cross.differences(problem, (out, lse), (out, lse + 0.1)) == "lse"
    assert cross.differences(problem, (out, lse), (out * torch.nan, empty)) == "out and lse"
