"""Replays of latent attention: the launches of calls that are checked in full, and their errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.integrations.vllm import latent
from cute_attn.integrations.vllm.metadata import Decodes
from cute_attn.wrappers import calls, mla
from tests.support.launch_corpus import RecordingDriver, pretended
from tests.support.mla_case import LATENT, SCALE, MlaCase
from tests.support.noted import noted

WORKSPACE = torch.empty(32 << 20, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDriver]:
    """A pretended H100, with one workspace for all calls."""
    monkeypatch.setattr(MlaCase, "workspace", lambda case: WORKSPACE)
    monkeypatch.setattr(MlaCase, "byte_rows", functools.cache(MlaCase.byte_rows))
    recording = RecordingDriver()
    with pretended(recording):
        yield recording


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were checked in full."""
    return noted(monkeypatch, mla, "mla_problem")


def case_of(seed: int = 0, **changes: Any) -> MlaCase:
    return MlaCase(**{"q_lens": (3, 3), "kv_lens": (70, 40), "page_size": 64, "seed": seed, **changes})


def by_vllm(case: MlaCase) -> Any:
    """With a row of padding."""
    step = latent.LatentDecodes(Decodes(2, 5, 3, uniform=False), case.table, case.seq_lens, case.qo_indptr, WORKSPACE)
    return latent.decode(case.q, case.cache, step, SCALE, 0.5, return_lse=True)


def into_buffers(case: MlaCase) -> Any:
    out, lse = torch.empty(2, 3, case.heads, LATENT, dtype=case.dtype), torch.empty(6, case.heads)
    return case.trtllm(out=out, lse=lse, bmm2_scale=torch.tensor([2.0]))


FORMS: dict[str, tuple[dict[str, Any], Callable[[MlaCase], Any]]] = {
    "whole": ({}, MlaCase.trtllm),
    "into buffers": ({"sinks": True}, into_buffers),
    "no rotated columns": ({"rope": 0}, MlaCase.trtllm),
    "bounds": ({"q_lens": (3, 1)}, MlaCase.trtllm),
    "FlashMLA": ({}, MlaCase.flash_mla),
    "rows of bytes": ({"narrow": True, "grouped": True, "wide": True}, MlaCase.flash_mla),
    "vLLM": ({}, by_vllm),
}


def launched(driver: RecordingDriver, found: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, dict[str, bytes]]:
    """The grid and the parameters of the latest launch but for addresses of results, which are those of `found`, of
    memory of the launch, and of rotated columns where there are none."""
    grid, values, _ = driver.recorded[-1]
    read = values.keys() - {"o", "lse"} - ({"kpe"} if values["q_pe"] == bytes(8) else set())
    for name, x in zip(("o", "lse"), found, strict=True):
        assert values[name] == x.data_ptr().to_bytes(8, "little")
    own = values["partials"] != WORKSPACE.data_ptr().to_bytes(8, "little")
    return grid, {name: values[name] for name in read - ({"partials"} if own else set())}


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
        replayed = launched(driver, made.run(*parts, **options))
        assert len(full_checks) == (i in (0, 3))
        other._planned = other._planned and other._planned._replace(entries={})
        assert replayed == launched(driver, other.run(*parts, **options))


def test_what_differs_is_checked(driver: RecordingDriver, full_checks: list[Any]) -> None:
    case = case_of()
    for _ in range(2):
        case.trtllm()
    for wrong, message in (
        ({"out": case.q.unflatten(0, (2, 3))[..., :LATENT]}, "out must not share memory with query"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape"),
        ({"lse": WORKSPACE[:96].view(torch.float32).view(6, 4)}, "lse must not share memory with workspace_buffer"),
    ):
        with pytest.raises(ArgumentError, match=message):
            case.trtllm(**wrong)
    full_checks.clear()
    case.made["seq_lens"] = torch.ones(4, dtype=torch.int32)[::2]  # is copied
    for _ in range(2):
        case.trtllm()
    assert len(full_checks) == 2
    made, parts = case_of().wrapper(query_layout="split"), case.parts()
    made.run(*parts)
    with pytest.raises(ArgumentError, match="query must be split, as planned"):
        made.run(query=case.q, kv_cache=parts[2:])
    with pytest.raises(ArgumentError, match="query must not come with q_nope"):
        made.run(*parts, query=case.q)
