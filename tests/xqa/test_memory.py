"""Memory that decode calls without a plan write: counters, partial results, and what outputs must not share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError, emulator, trtllm_batch_decode_with_kv_cache
from tests.xqa.test_replays import (  # noqa: F401 - `driver` is a fixture
    FUNCTIONS,
    HEAD_DIM,
    HEADS,
    RecordingDriver,
    arguments,
    driver,
)

WRITTEN = "out", "workspace_buffer"
TENSORS = ("query", "kv_cache", "block_tables", "seq_lens", "sinks")


def bytes_behind(size: int, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns zeros of `size` bytes, and a copy of the tensor at their start."""
    memory = torch.zeros(max(size, tensor.nbytes) + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    memory = memory[start : start + max(size, tensor.nbytes)]
    shared = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return memory[:size], shared.copy_(tensor)


def crossing(call: dict[str, Any], written: str, name: str) -> dict[str, Any]:
    """Returns the call with one tensor in the memory of `out` or of the workspace."""
    buffer = call[written]
    memory, shared = bytes_behind(buffer.nbytes, call[name])
    return {**call, name: shared, written: memory.view(buffer.dtype).view(buffer.shape)}


@pytest.mark.parametrize(("written", "name"), [*itertools.product(WRITTEN, TENSORS), ("workspace_buffer", "out")])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_shared_memory_is_refused_in_first_and_repeated_calls(
    function: Callable[..., Any],
    written: str,
    name: str,
    driver: RecordingDriver,  # noqa: F811
) -> None:
    call = arguments({"out": True, "sinks": True})
    wrong = crossing(call, written, name)
    message = "must not share memory with"
    with pytest.raises(ArgumentError, match=message):
        function(**wrong)
    assert not driver.recorded
    for _ in range(3):
        function(**call)
    driver.recorded.clear()
    with pytest.raises(ArgumentError, match=message):
        function(**wrong)
    assert not driver.recorded


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_shared_memory_is_refused_on_the_emulator(function: Callable[..., Any], written: str) -> None:
    call = {**arguments({"out": True, "sinks": True}), "backend": "emulator"}
    for name in TENSORS:
        with emulator.using("sm_90a"), pytest.raises(ArgumentError, match="must not share memory with"):
            function(**crossing(call, written, name))


def attention(call: dict[str, Any]) -> torch.Tensor:
    """Returns the outputs in fp64."""
    rows = []
    for q, table, length in zip(call["query"], call["block_tables"], call["seq_lens"].tolist(), strict=True):
        k, v = call["kv_cache"][table.long()].double().unbind(1)
        k, v = (x.flatten(0, 1)[:length].repeat_interleave(HEADS[0] // HEADS[1], 1) for x in (k, v))
        p = torch.softmax(torch.einsum("hd,nhd->hn", q.double(), k) * call["bmm1_scale"], -1)
        rows.append(torch.einsum("hn,nhd->hd", p, v))
    return torch.stack(rows)


def test_trtllm_decode_takes_a_workspace_that_is_not_zero() -> None:
    call = arguments({})
    call["block_tables"] = torch.randint(12, (3, 60), dtype=torch.int32)
    call.update(seq_lens=torch.tensor([900, 35, 300], dtype=torch.int32), max_seq_len=900)
    call["workspace_buffer"].fill_(7)
    given = torch.zeros(1 << 14, dtype=torch.uint8)
    for counters in (None, given):
        with emulator.using("sm_90a"):
            out = trtllm_batch_decode_with_kv_cache(**call, backend="emulator", multi_ctas_kv_counter_buffer=counters)
        assert out.shape[-1] == HEAD_DIM
        torch.testing.assert_close(out.double(), attention(call), rtol=0, atol=0.02)
    assert not given.any()


def test_counters_of_trtllm_decode_are_not_in_the_workspace(driver: RecordingDriver) -> None:  # noqa: F811
    for _ in range(3):
        call = arguments({})
        call |= {"max_seq_len": 1 << 13, "block_tables": call["block_tables"].repeat(1, 128)}  # too long for clusters
        trtllm_batch_decode_with_kv_cache(**call)
        start = call["workspace_buffer"].data_ptr()
        values = {
            n: int.from_bytes(x, "little") for n, x in driver.recorded[-1][1].items() if n in ("counters", "partials")
        }
        assert values["partials"] == start
        assert not start <= values["counters"] < start + call["workspace_buffer"].nbytes
