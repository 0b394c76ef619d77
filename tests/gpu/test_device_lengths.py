"""Plans and replays that the host does not wait for: lengths on the GPU, and captured graphs that plan again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import (
    BatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from tests.gpu import marks
from tests.support.xqa_batches import fp8_answer, fp8_request

PAGE_SIZE, HEADS, HEAD_DIM, BATCH, PAGES = 16, (8, 2), 128, 37, 700
E4M3 = torch.float8_e4m3fn

pytestmark = marks.GPU


@contextlib.contextmanager
def waits_are_errors(active: bool) -> Iterator[None]:
    """Calls of torch that wait for the GPU raise an error."""
    torch.cuda.set_sync_debug_mode("error" if active else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns indptr, page numbers and last_page_len of a random batch, on the CPU. Some requests have no page."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, PAGES // BATCH, (BATCH,), generator=generator)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    last = torch.randint(1, PAGE_SIZE + 1, (BATCH,), generator=generator)
    return indptr.int(), torch.randperm(PAGES, generator=generator).int(), last.int()


def cache() -> torch.Tensor:
    return torch.randn(PAGES, 2, PAGE_SIZE, HEADS[1], HEAD_DIM, device="cuda").to(E4M3)


def expected(arrays: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Returns what the reference computes on the CPU."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    wrapper.plan(*arrays, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=q.dtype, kv_data_type=kv.dtype)
    return wrapper.run(q.cpu(), kv.cpu())


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_from_lengths_on_the_gpu_does_not_wait(dtype: torch.dtype) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    kv, q = cache(), torch.randn(BATCH, HEADS[0], HEAD_DIM, device="cuda").bfloat16()
    options = {"q_data_type": q.dtype, "kv_data_type": E4M3}
    for seed in range(5):
        arrays = batch(seed)
        on_gpu = [x.to("cuda", dtype) if x is not arrays[1] else x.cuda() for x in arrays]
        with waits_are_errors(seed > 0):  # the first plan loads kernels
            wrapper.plan(*on_gpu, *HEADS, HEAD_DIM, PAGE_SIZE, **options)
            out = wrapper.run(q, kv)
        assert wrapper.resolved_backend == "xqa"
        close(out, expected(arrays, q, kv))


def test_a_captured_graph_plans_again() -> None:
    """A graph of plan and run computes the batch that its tensors describe at each replay."""
    arrays, kv = [x.cuda() for x in batch(0)], cache()
    q = torch.randn(BATCH, HEADS[0], HEAD_DIM, device="cuda").bfloat16()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(BATCH + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.zeros(PAGES, dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.zeros(BATCH, dtype=torch.int32, device="cuda"),
    )

    def step() -> torch.Tensor:
        wrapper.plan(*arrays, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=q.dtype, kv_data_type=E4M3)
        return wrapper.run(q, kv)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(1, 50):
        now = batch(seed)
        for target, source in zip(arrays, now, strict=True):
            target.copy_(source)
        q.copy_(torch.randn_like(q))
        graph.replay()
        close(out, expected(now, q, kv))


@pytest.mark.parametrize("qo_len", [None, 1, 300])
@pytest.mark.parametrize("kv_len", [300, 20_000])
def test_single_calls_are_replayed_and_captured(qo_len: int | None, kv_len: int) -> None:
    """Later calls with other tensors, on a second stream too, then a captured one whose inputs change."""
    function = single_decode_with_kv_cache if qo_len is None else single_prefill_with_kv_cache

    def inputs() -> list[torch.Tensor]:
        q = torch.randn(*(() if qo_len is None else (qo_len,)), *(HEADS[0], HEAD_DIM), device="cuda").bfloat16()
        return [q, *torch.randn(2, kv_len, HEADS[1], HEAD_DIM, device="cuda").bfloat16()]

    def check(out: torch.Tensor, x: list[torch.Tensor]) -> None:
        close(out, function(*(y.cpu() for y in x)))

    kept = inputs()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(4):
        streams[i % 2].wait_stream(streams[(i + 1) % 2])
        with torch.cuda.stream(streams[i % 2]):
            x = inputs()
            out = function(*x)
        streams[i % 2].synchronize()
        check(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*kept)
    for _ in range(2):
        for target, source in zip(kept, inputs(), strict=True):
            target.copy_(source)
        graph.replay()
        check(out, kept)


@pytest.mark.parametrize(("qo_len", "num_kv_heads"), [(None, 2), (None, 8), (16, 2), (100, 2)])
def test_single_calls_over_a_growing_cache(qo_len: int | None, num_kv_heads: int) -> None:
    """Every call with more keys than the one before, twice; a captured one stays what it was when later ones grow."""
    function = single_decode_with_kv_cache if qo_len is None else single_prefill_with_kv_cache
    q = torch.randn(*(() if qo_len is None else (qo_len,)), 8, HEAD_DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, 30_000, num_kv_heads, HEAD_DIM, device="cuda").bfloat16()

    def check(out: torch.Tensor, kv_len: int) -> None:
        close(out, function(q.cpu(), k[:kv_len].cpu(), v[:kv_len].cpu()))

    graph = torch.cuda.CUDAGraph()
    for kv_len in (100, 101, 102, 500, 2000, 2001, 9000, 30_000):
        for _ in range(2):
            check(function(q, k[:kv_len], v[:kv_len]), kv_len)
        if kv_len == 2001:
            with torch.cuda.graph(graph):
                captured = function(q, k[:kv_len], v[:kv_len])
    graph.replay()
    check(captured, 2001)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_requests_of_fp8(kv_layout: str) -> None:
    """Also captured, with the calls of other lengths between replays."""
    graphs = []
    for kv_len in (0, 1, 31, 32, 33, 5000, 131072):
        q, k, v = fp8_request(kv_len, "cuda", kv_layout)
        out = single_decode_with_kv_cache(q, k, v, kv_layout)
        expected = fp8_answer(q, k, v, kv_layout)
        assert float(torch.linalg.vector_norm(out.double() - expected)) <= 5e-3 * float(
            torch.linalg.vector_norm(expected)
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = single_decode_with_kv_cache(q, k, v, kv_layout)
        graphs.append((graph, captured, out, (q, k, v)))
    for _ in range(3):
        for graph, captured, out, _ in graphs:
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, out)


@pytest.mark.parametrize("workspace_bytes", [64 << 20, 64])
def test_decode_calls_are_replayed_and_captured(workspace_bytes: int) -> None:
    """Calls without a plan with other tensors, on a second stream too, then a captured one whose tables change."""
    workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device="cuda")

    def inputs() -> list[torch.Tensor]:
        q = torch.randn(BATCH, HEADS[0], HEAD_DIM, device="cuda").bfloat16()
        tables = torch.randint(PAGES, (BATCH, 40), dtype=torch.int32, device="cuda")
        return [q, cache(), tables, torch.randint(1, 640, (BATCH,), dtype=torch.int32, device="cuda")]

    def decode(x: list[torch.Tensor], memory: torch.Tensor) -> torch.Tensor:
        q, kv, tables, lengths = x
        return xqa_batch_decode_with_kv_cache(q, kv, memory, tables, lengths, 640, bmm1_scale=HEAD_DIM**-0.5)

    def check(out: torch.Tensor, x: list[torch.Tensor]) -> None:
        close(out, decode([y.cpu() for y in x], torch.zeros(64, dtype=torch.uint8)))

    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(4):
        streams[i % 2].wait_stream(streams[(i + 1) % 2])
        with torch.cuda.stream(streams[i % 2]):
            x = inputs()
            out = decode(x, workspace)
        streams[i % 2].synchronize()
        check(out, x)
    kept, graph = inputs(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(kept, workspace)
    for _ in range(3):
        for target, source in zip(kept, inputs(), strict=True):
            target.copy_(source)
        graph.replay()
        check(out, kept)


def test_wrappers_may_be_freed_while_a_graph_is_captured() -> None:
    """Plans refer to each other, so that the garbage collector frees them: at any time, and also in a capture."""
    arrays, q, kv = batch(7), torch.randn(BATCH, HEADS[0], HEAD_DIM, device="cuda").bfloat16(), cache()
    kept: Any = BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
    freed: Any = BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
    for wrapper in (kept, freed):
        wrapper.plan(*arrays, *HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=q.dtype, kv_data_type=kv.dtype)
        wrapper.run(q, kv)
    graph, out = torch.cuda.CUDAGraph(), torch.full_like(q, float("nan"))
    with torch.cuda.graph(graph):
        del freed, wrapper
        gc.collect()
        kept.run(q, kv, out=out)
    graph.replay()
    close(out, expected(arrays, q, kv))
