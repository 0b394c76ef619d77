"""Decode calls without a plan: what repeated ones check, and the memory that they write. The launches of repeated ones:
`tests/api/test_replayed_calls.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import emulator, trtllm_batch_decode_with_kv_cache
from cute_attn.wrappers import calls
from cute_attn.xqa import decode as xqa_decode
from tests.support.dense_attention import decoded
from tests.support.entry_points import ENTRIES, WORKSPACE_BYTES, Call, randn, zeros
from tests.support.launch_corpus import RecordingDriver, pretended
from tests.support.noted import noted


@pytest.fixture(params=["xqa", "trtllm"])
def call(request: pytest.FixtureRequest, driver: RecordingDriver) -> Call:
    """A call with the tensors of its entry, but for those that are given."""
    entry = ENTRIES[request.param]
    begun = entry.begin(entry.tensors)
    return lambda given: begun({**entry.tensors, **given})


def test_what_addresses_and_tensors_decide_is_checked_in_every_call(
    call: Call, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with tensors: `tests/request`."""
    full_checks = noted(monkeypatch, xqa_decode, "decode_problem")
    for _ in range(3):
        call({})
    assert len(full_checks) == 1
    driver.recorded.clear()
    full_checks.clear()
    call({"workspace_buffer": zeros(WORKSPACE_BYTES + 4)[4:]})  # memory of the launch's own
    call({"bmm1_scale": torch.tensor(0.125)})
    for _ in range(2):
        call({"seq_lens": torch.ones(4, dtype=torch.int32)[::2]})  # is copied
    monkeypatch.setattr(calls, "looks_at_values", lambda device: True)
    call({})
    assert len(full_checks) == len(driver.recorded) == 5


def test_calls_are_bounded_in_number(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CACHE_SIZE", 8)
    for i in range(20):
        call({"bmm1_scale": 1.0 + i})
        assert 1 <= len(calls.UNPLANNED) <= 8


@pytest.mark.parametrize("capturing", [False, True])
def test_values_are_not_looked_at_under_capture(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    monkeypatch.setattr(calls, "is_capturing", lambda device: capturing)
    assert calls.looks_at_values(torch.device("cuda", 0)) is not capturing


# ---- counters and partial results


def trtllm(**options: Any) -> Any:
    return trtllm_batch_decode_with_kv_cache(**{"kv_layout": "NHD", "bmm1_scale": 0.125, **options})


def test_trtllm_decode_takes_a_workspace_that_is_not_zero() -> None:
    query, cache = randn(3, 8, 64), randn(12, 2, 16, 2, 64)
    tables, lengths = torch.randint(12, (3, 60), dtype=torch.int32), [900, 35, 300]
    where = {"block_tables": tables, "seq_lens": torch.tensor(lengths, dtype=torch.int32), "max_seq_len": 900}
    pages = [table[: -(-n // 16)] for table, n in zip(tables, lengths, strict=True)]
    expected, _ = decoded(query, cache, lengths, torch.cat(pages))
    given = zeros(1 << 14)
    for counters in (None, given):
        call = {"query": query, "kv_cache": cache, "workspace_buffer": zeros(16 << 20) + 7, **where}
        with emulator.using("sm_90a"):
            out = trtllm(**call, backend="emulator", multi_ctas_kv_counter_buffer=counters)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)
    assert not given.any()


def test_counters_of_trtllm_decode_are_not_in_the_workspace() -> None:
    driver, tables = RecordingDriver(), torch.randint(12, (3, 1 << 11), dtype=torch.int32)
    where = {"block_tables": tables, "seq_lens": torch.full((3,), 50, dtype=torch.int32), "max_seq_len": 1 << 15}
    tensors = {"query": randn(3, 8, 64), "kv_cache": randn(12, 2, 16, 2, 64)}
    for _ in range(3):
        workspace = zeros(16 << 20)
        with pretended(driver):
            trtllm(**tensors, **where, workspace_buffer=workspace)  # too long for clusters
        start, passed = workspace.data_ptr(), driver.recorded[-1].values
        counters, partials = (int.from_bytes(passed[name], "little") for name in ("counters", "partials"))
        assert partials == start
        assert not start <= counters < start + workspace.nbytes
