"""Nine of ten mutated kernels are detected; the survivors compute right results. `mutate` reports on all kernels."""

from __future__ import annotations

import pytest

from tests.emulator.mutate import report

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("name", ["append", "decode"])
def test_mutants_are_caught(name: str) -> None:
    found = report([name])
    print(found)
    assert isinstance(found["caught"], int)
    assert found["caught"] >= 10
    assert isinstance(found["share"], float)
    assert found["share"] >= 0.9, found["survivors"]
