"""Replays of latent attention under later plans, and errors of repeated calls. The launches of all entry points:
`tests/api/test_replayed_calls.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn.wrappers import mla
from tests.support.launch_corpus import RecordingDriver, parameters
from tests.support.mla_case import SCALE, MlaCase
from tests.support.noted import noted

WORKSPACE = torch.empty(32 << 20, dtype=torch.uint8)


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were checked in full. All calls have one workspace."""
    monkeypatch.setattr(MlaCase, "workspace", lambda case: WORKSPACE)
    return noted(monkeypatch, mla, "mla_problem")


def case_of(seed: int = 0, **changes: Any) -> MlaCase:
    return MlaCase(**{"q_lens": (3, 3), "kv_lens": (70, 40), "page_size": 64, "seed": seed, **changes})


def launched(driver: RecordingDriver, found: tuple[torch.Tensor, torch.Tensor], *parts: torch.Tensor) -> Any:
    """The grid and the parameters of the latest launch."""
    named = zip(("out", "lse", "q_nope", "q_pe", "ckv", "kpe"), (*found, *parts), strict=True)
    return driver.recorded[-1].grid, parameters(driver.recorded[-1], {"workspace": WORKSPACE, **dict(named)})


@pytest.mark.parametrize("changes", [{}, {"rope": 0}, {"narrow": True}, {"narrow": True, "grouped": True}], ids=str)
def test_runs_of_plans(changes: dict[str, Any], driver: RecordingDriver, full_checks: list[Any]) -> None:
    """Of one plan, of the next one with other lengths of as many pages, and of one with another scale."""
    made, other = case_of(**changes).wrapper(), case_of(**changes).wrapper()
    for i, scale in enumerate((SCALE, SCALE, SCALE, 1.0)):
        case = case_of(i, **changes)
        if i != 1:
            planned = case.arrays(kv_len_arr=case.seq_lens - i) | case.options(sm_scale=scale)
            for wrapper in (made, other):
                wrapper.plan(**planned)
        full_checks.clear()
        parts, options = case.parts(), {"return_lse": True, **case.scale_options()}
        replayed = launched(driver, made.run(*parts, **options), *parts)
        assert len(full_checks) == (i in (0, 3))
        other._planned = other._planned and other._planned._replace(entries={})
        assert replayed == launched(driver, other.run(*parts, **options), *parts)


def test_what_differs_is_checked(driver: RecordingDriver, full_checks: list[Any]) -> None:
    """Other tensors: `tests/request/test_stored.py`."""
    case = case_of()
    for _ in range(2):
        case.trtllm()
    full_checks.clear()
    case.made["seq_lens"] = torch.ones(4, dtype=torch.int32)[::2]  # is copied
    for _ in range(2):
        case.trtllm()
    assert len(full_checks) == 2
