"""Memory that decode calls without a plan write: counters and partial results."""

from __future__ import annotations

from typing import Any

import torch

from cute_attn import emulator, trtllm_batch_decode_with_kv_cache
from tests.xqa.test_replays import (  # noqa: F401 - `driver` is a fixture
    FUNCTIONS,
    HEAD_DIM,
    HEADS,
    RecordingDriver,
    arguments,
    driver,
)


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
