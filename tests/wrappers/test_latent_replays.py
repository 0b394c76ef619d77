"""Replays of latent attention: the launches of calls that are checked in full, and their errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, NotSupported
from cute_attn.integrations.vllm import latent
from cute_attn.integrations.vllm.metadata import Decodes
from cute_attn.wrappers import calls, mla
from tests.support.launch_corpus import RecordingDriver, pretended
from tests.support.mla_case import LATENT, SCALE, MlaCase

WORKSPACE = torch.empty(32 << 20, dtype=torch.uint8)
RESULTS = {"o", "lse"}


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    recording = RecordingDriver()
    with pretended(recording):
        yield recording


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were checked in full. All calls have one workspace."""
    taken: list[Any] = []
    check = mla.mla_problem

    def counted(*arguments: Any) -> Any:
        taken.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(mla, "mla_problem", counted)
    monkeypatch.setattr(MlaCase, "workspace", lambda case: WORKSPACE)
    monkeypatch.setattr(MlaCase, "byte_rows", functools.cache(MlaCase.byte_rows))
    return taken


def case_of(seed: int = 0, **changes: Any) -> MlaCase:
    return MlaCase(**{"q_lens": (3, 3), "kv_lens": (70, 40), "page_size": 64, "seed": seed, **changes})


def by_vllm(case: MlaCase) -> Any:
    """With two rows of padding."""
    step = latent.LatentDecodes(Decodes(2, 6, 3, uniform=True), case.table, case.seq_lens, case.qo_indptr, WORKSPACE)
    case.made["q"] = torch.cat((case.q, case.q[:2])) if len(case.q) == 6 else case.q
    return latent.decode(case.q, case.cache, step, SCALE, 0.5, return_lse=True)


def into_buffers(case: MlaCase) -> Any:
    out, lse = torch.empty(2, 3, case.heads, LATENT, dtype=case.dtype), torch.empty(6, case.heads)
    found = case.trtllm(out=out, lse=lse, bmm2_scale=torch.tensor([2.0]))
    assert (found[0] is out, found[1] is lse) == (True, True)
    return found


FORMS: dict[str, tuple[dict[str, Any], Callable[[MlaCase], Any]]] = {
    "whole": ({}, MlaCase.trtllm),
    "into buffers": ({"sinks": True}, into_buffers),
    "no rotated columns": ({"rope": 0}, MlaCase.trtllm),
    "bounds": ({"q_lens": (3, 1)}, MlaCase.trtllm),
    "FlashMLA": ({}, MlaCase.flash_mla),
    "rows of bytes": ({"narrow": True, "grouped": True, "wide": True}, MlaCase.flash_mla),
    "vLLM": ({}, by_vllm),
}


def launched(driver: RecordingDriver, found: Any) -> tuple[Any, dict[str, bytes]]:
    """The grid and the parameters of the latest launch but for addresses of results, which are those of `found`, and
    of rotated columns where there are none.
    """
    grid, values, _ = driver.recorded[-1]
    out, lse = found
    assert values["o"] == out.data_ptr().to_bytes(8, "little")
    assert values["lse"] == lse.data_ptr().to_bytes(8, "little")
    own = (
        RESULTS
        | ({"kpe"} if values["q_pe"] == bytes(8) else set())
        | ({"partials"} if values["partials"] != WORKSPACE.data_ptr().to_bytes(8, "little") else set())
    )
    return grid, {name: value for name, value in values.items() if name not in own}


@pytest.mark.parametrize(("changes", "call"), FORMS.values(), ids=FORMS)
def test_calls(
    changes: dict[str, Any], call: Callable[[MlaCase], Any], driver: RecordingDriver, full_checks: list[Any]
) -> None:
    """With tensors at other addresses."""
    cases = [case_of(seed, **changes) for seed in range(3)]
    kept = [(found := call(case), launched(driver, found)) for case in cases]
    assert len(full_checks) == 1
    for case, (found, replayed) in zip(cases, kept, strict=True):
        calls.forget()
        full = call(case)
        assert replayed == launched(driver, full)
        for x, y in zip(found, full, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    assert len(full_checks) == 4


@pytest.mark.parametrize("changes", [{}, {"rope": 0}, {"narrow": True}, {"narrow": True, "grouped": True}], ids=str)
def test_runs_of_plans(changes: dict[str, Any], driver: RecordingDriver, full_checks: list[Any]) -> None:
    """Of one plan, and of the next one with other lengths of as many pages."""
    cases = [case_of(seed, **changes) for seed in range(4)]
    made, other = cases[0].wrapper(), cases[0].wrapper()
    for i, case in enumerate(cases):
        if i % 2 == 0:
            arrays = case.qo_indptr, case.kv_indptr, case.indices, case.seq_lens - i
            for wrapper in (made, other):
                wrapper.plan(*arrays, case.heads, LATENT, case.rope, 64, True, SCALE, case.dtype, case.cache.dtype)
        full_checks.clear()
        parts, options = case.parts(), {"return_lse": True, **case.scale_options()}
        replayed = launched(driver, made.run(*parts, **options))
        assert len(full_checks) == (i < 1)
        other._planned.entries.clear()
        assert replayed == launched(driver, other.run(*parts, **options))
        assert len(full_checks) == 1 + (i < 1)


def test_what_differs_is_checked(driver: RecordingDriver, full_checks: list[Any]) -> None:
    case = case_of()
    for _ in range(2):
        case.trtllm()
    assert len(full_checks) == 1
    q, query = case.q, case.q.unflatten(0, (2, 3))
    for wrong, message in (
        ({"out": query[..., :LATENT]}, "out must not share memory with query"),
        ({"bmm1_scale": "1"}, "bmm1_scale must be"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape"),
        ({"lse": WORKSPACE[:96].view(torch.float32).view(6, 4)}, "lse must not share memory with workspace_buffer"),
    ):
        with pytest.raises((ArgumentError, TypeError), match=message):
            case.trtllm(**wrong)
    case.made["q"] = q.requires_grad_()
    with pytest.raises(ArgumentError, match="query requires grad"):
        case.trtllm()
    case.made["q"] = q.detach()
    with pytest.raises(NotSupported, match="enable_dcp"):
        case.trtllm(enable_dcp=True)
    full_checks.clear()
    case.made["seq_lens"] = torch.ones(4, dtype=torch.int32)[::2]  # is copied
    for _ in range(2):
        case.trtllm()
    assert len(full_checks) == 2


def test_a_plan_with_other_options_has_no_entries(driver: RecordingDriver, full_checks: list[Any]) -> None:
    case = case_of()
    made = case.wrapper()
    arrays, dims = (case.qo_indptr, case.kv_indptr, case.indices, case.seq_lens), (case.heads, LATENT, case.rope, 64)
    for causal, scale in ((True, SCALE), (False, SCALE), (False, 1.0)):
        full_checks.clear()
        made.plan(*arrays, *dims, causal, scale, case.dtype, case.dtype, query_layout="split")
        for _ in range(2):
            made.run(*case.parts())
        assert len(full_checks) == 1
    with pytest.raises(ArgumentError, match="query must be split, as planned"):
        made.run(query=case.q, kv_cache=case.parts()[2:])
    with pytest.raises(ArgumentError, match="query must not come with q_nope"):
        made.run(*case.parts(), query=case.q)
