"""fa2 and persistent kernels on the same inputs, as `tests/gpu/test_cross.py`, on the emulator: some short problems."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cute_attn.emulator import using
from tests.support import cross
from tests.support.batch_case import BatchCase
from tests.support.case import Case
from tests.support.persistent_emulated import TARGETS, Target, name
from tests.support.right import Solver

pytestmark = pytest.mark.emulator

SEEDS = (0,)


@pytest.mark.parametrize("draw", [cross.batch, cross.single], ids=["batch", "single"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_backends_are_right(target: Target, seed: int, draw: Callable[..., Case | BatchCase]) -> None:
    problem = draw(target, seed, max_len=150)
    for backend in cross.backends(target):
        with using(target.arch, kernels=backend, sms=2) as emulation:
            Solver(problem, backend="emulator").assert_right()
        assert {record.spec["kernel"] for record in emulation.records} - {"combine"} == {backend}
