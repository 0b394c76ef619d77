"""Replays of decode calls without a plan: the launches of calls that are checked in full, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from cute_attn import (
    ArgumentError,
    ArgumentTypeError,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from cute_attn.wrappers import calls
from cute_attn.xqa import decode as xqa_decode
from tests.support.launch_corpus import Launched, RecordingDriver, pretended
from tests.support.noted import noted

HEADS, HEAD_DIM, PAGE_SIZE, PAGES, BATCH = (8, 2), 64, 16, 12, 3
WORKSPACE_BYTES = 16 << 20
CASES: dict[str, dict[str, Any]] = {
    "one tensor": {},
    "a pair, by heads": {"kv_layout": "HND", "pair": True, "return_lse": True},
    "fp8, sinks, a window": {"dtype": torch.float8_e4m3fn, "sinks": True, "window_left": 20, "bmm2_scale": 0.5},
    "drafts into a buffer": {"q_len_per_req": 3, "out": True},
    "a small workspace": {"workspace_bytes": 64, "out": True, "enable_pdl": False},
    "a mask of drafts": {"q_len_per_req": 3, "mask": True, "sinks": True},
    "drafts of any number": {"q_len_per_req": 3, "ragged": True, "lse": True, "return_lse": True},
    "NVFP4": {"dtype": torch.uint8, "kv_cache_sf": True, "sinks": True},
    "NVFP4, a pair by heads": {"dtype": torch.uint8, "kv_cache_sf": True, "pair": True, "kv_layout": "HND"},
}
FUNCTIONS = {"xqa": xqa_batch_decode_with_kv_cache, "trtllm": trtllm_batch_decode_with_kv_cache}


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    """A pretended H100 for CPU tensors, whose values nobody looks at."""
    recording = RecordingDriver()
    with pretended(recording):
        yield recording


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were checked in full."""
    return noted(monkeypatch, xqa_decode, "decode_problem")


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, with tensors at other addresses in each."""
    given = {"kv_layout": "NHD", "bmm1_scale": 0.125, **case}
    q_len, layout = given.get("q_len_per_req", 1), given["kv_layout"]
    dtype, pair = given.pop("dtype", torch.bfloat16), given.pop("pair", False)
    page = (HEADS[1], PAGE_SIZE) if layout == "HND" else (PAGE_SIZE, HEADS[1])
    cache = torch.randn(PAGES, 2, *page, HEAD_DIM // 2 if dtype == torch.uint8 else HEAD_DIM).to(dtype)
    given["query"] = torch.randn(BATCH * q_len, HEADS[0], HEAD_DIM).bfloat16()
    given["kv_cache"] = (cache[:, 0].clone(), cache[:, 1].clone()) if pair else cache
    given["workspace_buffer"] = torch.zeros(given.pop("workspace_bytes", WORKSPACE_BYTES), dtype=torch.uint8)
    given["block_tables"] = torch.randint(PAGES, (BATCH, 4), dtype=torch.int32)
    given["seq_lens"] = torch.randint(1, 60, (BATCH,), dtype=torch.int32)
    given["max_seq_len"] = int(given["seq_lens"].max())
    if given.pop("sinks", False):
        given["sinks"] = torch.randn(HEADS[0])
    if given.pop("out", False):
        given["out"] = torch.empty_like(given["query"])
    if given.pop("kv_cache_sf", False):
        scales = torch.ones(PAGES, 2, *page, HEAD_DIM // 16).to(torch.float8_e4m3fn)
        given["kv_cache_sf"] = (scales[:, 0].clone(), scales[:, 1].clone()) if pair else scales
    if given.pop("mask", False):
        given["mask"] = torch.randint(8, (BATCH * q_len, 1), dtype=torch.int32)
    if given.pop("ragged", False):
        given["q_cu_seq_lens"] = torch.tensor([0, 1, 3, BATCH * q_len], dtype=torch.int32)
    if given.pop("lse", False):
        given["lse"] = torch.empty(BATCH * q_len, HEADS[0])
    return given


def call_with(function: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Calls a function with the names that it has for arguments."""
    if function is trtllm_batch_decode_with_kv_cache and "q_cu_seq_lens" in call:
        call = {**call, "cum_seq_lens_q": call["q_cu_seq_lens"], "max_q_len": call["q_len_per_req"]}
        del call["q_cu_seq_lens"], call["q_len_per_req"]
    return function(**call)


def own_memory(launched: Launched, call: dict[str, Any]) -> tuple[Any, dict[str, bytes]]:
    """Return the grid and the parameters but for addresses of memory that the launch allocates itself."""
    grid, values, _ = launched
    own = {"counters", "partials"} if call["workspace_buffer"].nbytes < WORKSPACE_BYTES else set()
    own |= {name for name, buffer in (("o", "out"), ("lse", "lse")) if buffer not in call}
    return grid, {name: value for name, value in values.items() if name not in own}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replays_launch_what_full_calls_do(
    case: dict[str, Any], function: Callable[..., Any], driver: RecordingDriver, full_checks: list[Any]
) -> None:
    for i in range(4):
        call = arguments(case)
        with mock.patch.object(calls, "UNPLANNED", {}):
            wanted = call_with(function, call)
        full_checks.clear()
        found = call_with(function, call)
        assert len(full_checks) == (i < 1)
        full, replayed = driver.recorded
        driver.recorded.clear()
        assert own_memory(replayed, call) == own_memory(full, call)
        results, expected = (r if isinstance(r, tuple) else (r,) for r in (found, wanted))
        for name, x, y in zip(("o", "lse"), results, expected, strict=False):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
            assert replayed[1][name] == x.data_ptr().to_bytes(8, "little")
            assert (x is y) == ((name == "o" and "out" in call) or (name == "lse" and "lse" in call))
        assert len(results) == len(expected)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_addresses_and_tensors_decide_is_checked_in_every_call(
    function: Callable[..., Any], driver: RecordingDriver, full_checks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = arguments({"out": True})
    for _ in range(3):
        function(**call)
    full_checks.clear()
    query, workspace = call["query"], call["workspace_buffer"]
    for wrong, message in (
        ({"out": torch.empty_like(query).requires_grad_()}, "out requires grad"),
        ({"query": query.clone().requires_grad_()}, "query requires grad"),
        ({"query": torch._neg_view(query)}, "query must not be a negative view"),
        ({"seq_lens": call["seq_lens"].long()}, "seq_lens must have dtype"),
        ({"max_seq_len": -1}, "max_seq_len must be at least 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            function(**{**call, **wrong})
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="query has a tangent of forward-mode AD"):
        function(**{**call, "query": forward_ad.make_dual(query, query)})
    with pytest.raises(ArgumentTypeError, match="window_left must be an int"):
        function(**{**call, "window_left": -1.0})
    driver.recorded.clear()
    full_checks.clear()
    shifted = torch.zeros(workspace.numel() + 4, dtype=torch.uint8)[4:]
    function(**{**call, "workspace_buffer": shifted})  # memory of the launch's own
    function(**{**call, "bmm1_scale": torch.tensor(0.125)})
    for _ in range(2):
        function(**{**call, "seq_lens": torch.ones(2 * BATCH, dtype=torch.int32)[::2]})  # is copied
    monkeypatch.setattr(calls, "looks_at_values", lambda device: True)
    function(**call)
    assert len(full_checks) == len(driver.recorded) == 5


def test_calls_are_bounded_in_number(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CACHE_SIZE", 8)
    call = arguments({})
    for i in range(20):
        xqa_batch_decode_with_kv_cache(**{**call, "bmm1_scale": 1.0 + i})
        assert 1 <= len(calls.UNPLANNED) <= 8


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("scales", [(), (None, None), torch.ones(8), torch.ones(PAGES, 3), 1.0], ids=str)
def test_block_scales_after_calls_without_them(
    scales: Any, function: Callable[..., Any], driver: RecordingDriver
) -> None:
    """They are refused like those of a first call."""
    call = arguments({})
    for _ in range(2):
        call_with(function, call)
    with pytest.raises((ArgumentError, ArgumentTypeError), match="kv_cache_sf"):
        call_with(function, {**call, "kv_cache_sf": scales})


@pytest.mark.parametrize("capturing", [False, True])
def test_values_are_not_looked_at_under_capture(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    monkeypatch.setattr(calls, "is_capturing", lambda device: capturing)
    assert calls.looks_at_values(torch.device("cuda", 0)) is not capturing
