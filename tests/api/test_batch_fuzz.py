"""Corrupted batches on CPU tensors."""

from __future__ import annotations

import pytest

from tests.support import fuzz

COUNT = 600


@pytest.mark.parametrize("aligned", [False, True], ids=["cpu", "as on a GPU"])
def test_corrupted_input(aligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if aligned:
        monkeypatch.setattr("cute_attn.request.operands.KERNEL_DEVICES", ("cpu",))
    outcomes = fuzz.run(COUNT)
    assert outcomes.raised > COUNT // 2
    assert outcomes.valid > COUNT // 20
    assert set(outcomes.of) == {corruption.name for corruption in fuzz.CORRUPTIONS}
