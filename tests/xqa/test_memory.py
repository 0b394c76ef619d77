"""Memory that decode calls without a plan write: counters and partial results."""

from __future__ import annotations

import torch

from cute_attn import emulator, trtllm_batch_decode_with_kv_cache
from tests.support.dense_attention import decoded
from tests.support.launch_corpus import RecordingDriver, pretended
from tests.xqa.test_replays import HEAD_DIM, PAGE_SIZE, arguments


def test_trtllm_decode_takes_a_workspace_that_is_not_zero() -> None:
    call = arguments({})
    call["block_tables"] = torch.randint(12, (3, 60), dtype=torch.int32)
    call.update(seq_lens=torch.tensor([900, 35, 300], dtype=torch.int32), max_seq_len=900)
    call["workspace_buffer"].fill_(7)
    lengths = call["seq_lens"].tolist()
    pages = [table[: -(-n // PAGE_SIZE)] for table, n in zip(call["block_tables"], lengths, strict=True)]
    expected, _ = decoded(call["query"], call["kv_cache"], lengths, torch.cat(pages))
    given = torch.zeros(1 << 14, dtype=torch.uint8)
    for counters in (None, given):
        with emulator.using("sm_90a"):
            out = trtllm_batch_decode_with_kv_cache(**call, backend="emulator", multi_ctas_kv_counter_buffer=counters)
        assert out.shape[-1] == HEAD_DIM
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)
    assert not given.any()


def test_counters_of_trtllm_decode_are_not_in_the_workspace() -> None:
    driver = RecordingDriver()
    for _ in range(3):
        call = arguments({})
        call |= {"max_seq_len": 1 << 15, "block_tables": call["block_tables"].repeat(1, 512)}  # too long for clusters
        with pretended(driver):
            trtllm_batch_decode_with_kv_cache(**call)
        start, passed = call["workspace_buffer"].data_ptr(), driver.recorded[-1].values
        counters, partials = (int.from_bytes(passed[name], "little") for name in ("counters", "partials"))
        assert partials == start
        assert not start <= counters < start + call["workspace_buffer"].nbytes
