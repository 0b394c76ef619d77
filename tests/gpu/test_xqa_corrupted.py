"""Corrupted decode calls on a GPU, workspaces of any size, and keywords of engines that a GPU reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn import (
    NotSupported,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa,
    xqa_batch_decode_with_kv_cache,
)
from tests.gpu import marks
from tests.support import decode_refusals
from tests.support.batch_case import paged
from tests.support.graphs import cuda_graph, without_synchronising
from tests.support.right import assert_right
from tests.support.trtllm_prefill import context_arguments
from tests.support.xqa_case import Built, XqaCase, build

pytestmark = marks.GPU
CASE = XqaCase((57, 300, 4000), heads=(8, 2), kv_layout="HND")


@pytest.mark.parametrize(("name", "form"), decode_refusals.CALLS)
def test_wrong_calls(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each raises an error that names the argument, and the context survives all."""
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    decode_refusals.assert_refused(name, form, "cuda")
    torch.cuda.synchronize()


def test_without_validation_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths beyond the table count as its tokens then, and no call synchronises."""
    monkeypatch.delenv("CUTE_ATTN_VALIDATE", raising=False)
    built = build(XqaCase((48,), heads=(8, 2)), "cuda")
    table = built.arguments["block_tables"][:, :3]
    xqa_batch_decode_with_kv_cache(**built.arguments)
    longer = torch.tensor([57], dtype=torch.int32, device="cuda")
    with without_synchronising():
        out, lse = xqa_batch_decode_with_kv_cache(**built.arguments | {"block_tables": table, "seq_lens": longer})
    assert built.check(out, lse) == ""


# ---- workspaces


@pytest.mark.parametrize("words", [0, 3, 1 << 21])
def test_semaphores_of_any_size_on_several_streams(words: int) -> None:
    """Calls on four streams at once, whose buffers may be too small to be used."""
    built = build(CASE, "cuda")
    calls = [built.low_level(words) for _ in range(4)]
    for given in calls:
        xqa(**given)
    torch.cuda.synchronize()
    for given in calls:
        given["output"].zero_()
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, given in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                xqa(**given)
    torch.cuda.synchronize()
    for given in calls:
        assert built.check(given["output"], None) == ""


def test_small_semaphores_in_graphs_on_several_streams() -> None:
    """Launches of one graph, and of graphs replayed at the same time, have counters of their own."""
    built = build(CASE, "cuda")
    captured = []
    for _ in range(3):
        given = built.low_level(3)
        xqa(**given)
        _, replay = cuda_graph(lambda given=given: [xqa(**given) for _ in range(3)])
        given["output"].zero_()
        captured.append((replay, given["output"], torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        for replay, _, stream in captured:
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    for _, output, _ in captured:
        assert built.check(output, None) == ""


def test_a_short_workspace_of_a_batch_call() -> None:
    built = build(CASE, "cuda")
    for size in (0, 1, 1 << 10, 8 << 20):
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        out, lse = xqa_batch_decode_with_kv_cache(**built.arguments | {"workspace_buffer": workspace})
        assert built.check(out, lse) == ""
    misaligned = torch.zeros((32 << 20) + 1, dtype=torch.uint8, device="cuda")[1:]
    out, lse = xqa_batch_decode_with_kv_cache(**built.arguments | {"workspace_buffer": misaligned})
    assert built.check(out, lse) == ""


# ---- keywords


def engine_arguments(built: Built) -> dict[str, Any]:
    return {k: v for k, v in built.arguments.items() if k != "q_cu_seq_lens"}


def test_the_base_2_scale_follows_replays() -> None:
    built = build(CASE, "cuda")
    scale = torch.tensor([1.0], device="cuda")
    arguments = engine_arguments(built) | {"bmm1_scale_log2": scale}
    trtllm_batch_decode_with_kv_cache(**arguments)
    (out, lse), replay = cuda_graph(lambda: trtllm_batch_decode_with_kv_cache(**arguments))
    scale.fill_(CASE.scale * 1.4426950408889634)
    replay()
    assert built.check(out, lse) == ""


def test_values_in_pages_of_their_own() -> None:
    built = build(CASE, "cuda")
    arguments = engine_arguments(built) | {"uses_shared_paged_kv_idx": False}
    table, (k, v) = arguments["block_tables"], arguments["kv_cache"]
    pool = torch.cat((k, v))
    tables = torch.stack((table, table + k.shape[0]), 1)
    out, lse = trtllm_batch_decode_with_kv_cache(**arguments | {"kv_cache": (pool, pool), "block_tables": tables})
    assert built.check(out, lse) == ""
    same = arguments | {"block_tables": table[:, None].expand(-1, 2, -1)}
    (out, lse), replay = cuda_graph(lambda: trtllm_batch_decode_with_kv_cache(**same))
    replay()
    assert built.check(out, lse) == ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        table.add_(0)
        with pytest.raises(NotSupported, match="while a CUDA graph is captured"):
            trtllm_batch_decode_with_kv_cache(**arguments | {"kv_cache": (pool, pool), "block_tables": tables})


# ---- prefill


def test_a_context_call_cannot_be_captured() -> None:
    case = paged((30, 7), (64, 90), mask="causal", return_lse=True)
    inputs, arguments = context_arguments(case, "cuda")
    assert_right(case, inputs, *trtllm_batch_context_with_kv_cache(**arguments))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        arguments["seq_lens"].add_(0)
        with pytest.raises(NotSupported, match=r"cum_seq_lens_q=.*on the device"):
            trtllm_batch_context_with_kv_cache(**arguments)
    assert_right(case, inputs, *trtllm_batch_context_with_kv_cache(**arguments))


def test_context_calls_on_two_streams() -> None:
    """Each stream has schedules of its own."""
    case = paged((300, 70), (640, 900), mask="causal", return_lse=True, num_qo_heads=4)
    inputs, arguments = context_arguments(case, "cuda")
    results = []
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            workspace = torch.zeros_like(arguments["workspace_buffer"])
            results.append(trtllm_batch_context_with_kv_cache(**arguments | {"workspace_buffer": workspace}))
    torch.cuda.synchronize()
    for out, lse in results:
        assert_right(case, inputs, out, lse)


def test_lengths_on_the_host_cost_no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_ATTN_VALIDATE", raising=False)
    case = paged((30, 7), (64, 90), mask="causal", return_lse=True)
    inputs, arguments = context_arguments(case, "cuda")
    arguments |= {name: arguments[name].cpu() for name in ("seq_lens", "cum_seq_lens_q")}
    trtllm_batch_context_with_kv_cache(**arguments)
    with without_synchronising():
        result = trtllm_batch_context_with_kv_cache(**arguments)
    assert_right(case, inputs, *result)
