"""Calls without a plan: repeated on other streams, over other lengths, captured; a wrapper freed during a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_attn import single_decode_with_kv_cache, single_prefill_with_kv_cache, xqa_batch_decode_with_kv_cache
from tests.gpu import marks
from tests.support import matrix
from tests.support.batch_case import E4M3, decode, dims, heads
from tests.support.graphs import cuda_graph
from tests.support.matrix import BF16
from tests.support.right import Solver, assert_right, planned

HEADS, HEAD_DIM, BATCH, PAGES = (8, 2), 128, 37, 700
Tensors = list[torch.Tensor]

pytestmark = marks.GPU


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted, atol=2e-2, rtol=2e-2)


def single(qo_len: int | None, kv_len: int) -> tuple[Callable[..., Any], Callable[[], Tensors]]:
    """A call, and what makes its tensors."""

    def inputs() -> Tensors:
        q = torch.randn(*(() if qo_len is None else (qo_len,)), HEADS[0], HEAD_DIM, device="cuda").bfloat16()
        return [q, *torch.randn(2, kv_len, HEADS[1], HEAD_DIM, device="cuda").bfloat16()]

    return single_decode_with_kv_cache if qo_len is None else single_prefill_with_kv_cache, inputs


def batch(workspace_bytes: int) -> tuple[Callable[..., Any], Callable[[], Tensors]]:
    """A call, and what makes its tensors."""
    workspaces = {
        device: torch.zeros(size, dtype=torch.uint8, device=device)
        for device, size in (("cuda", workspace_bytes), ("cpu", 64))
    }

    def inputs() -> Tensors:
        q = torch.randn(BATCH, HEADS[0], HEAD_DIM, device="cuda").bfloat16()
        cache = torch.randn(PAGES, 2, 16, HEADS[1], HEAD_DIM, device="cuda").to(torch.float8_e4m3fn)
        tables = torch.randint(PAGES, (BATCH, 40), dtype=torch.int32, device="cuda")
        return [q, cache, tables, torch.randint(1, 640, (BATCH,), dtype=torch.int32, device="cuda")]

    def call(q: torch.Tensor, cache: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
        memory = workspaces[q.device.type]
        return xqa_batch_decode_with_kv_cache(q, cache, memory, *lengths, 640, bmm1_scale=HEAD_DIM**-0.5)

    return call, inputs


MADE = {
    f"{'decode' if qo_len is None else f'prefill of {qo_len}'} over {kv_len}": (single, (qo_len, kv_len))
    for qo_len in (None, 1, 300)
    for kv_len in (300, 20_000)
}
MADE |= {"xqa, large workspace": (batch, (64 << 20,)), "xqa, small workspace": (batch, (64,))}


@pytest.mark.parametrize(("make", "sizes"), MADE.values(), ids=MADE)
def test_calls_are_replayed_and_captured(make: Callable[..., Any], sizes: tuple[Any, ...]) -> None:
    """Later calls with other tensors, on a second stream too, then a captured one whose inputs change."""
    call, inputs = make(*sizes)

    def check(out: torch.Tensor, x: Tensors) -> None:
        close(out, call(*(y.cpu() for y in x)))

    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(4):
        streams[i % 2].wait_stream(streams[(i + 1) % 2])
        with torch.cuda.stream(streams[i % 2]):
            x = inputs()
            out = call(*x)
        streams[i % 2].synchronize()
        check(out, x)
    kept = inputs()
    out, replay = cuda_graph(lambda: call(*kept))
    for _ in range(3):
        for target, source in zip(kept, inputs(), strict=True):
            target.copy_(source)
        replay()
        check(out, kept)


@pytest.mark.parametrize(("qo_len", "num_kv_heads"), [(None, 2), (None, 8), (16, 2), (100, 2)])
def test_single_calls_over_a_growing_cache(qo_len: int | None, num_kv_heads: int) -> None:
    """Every call with more keys than the one before, twice; a captured one stays what it was when later ones grow."""
    function = single_decode_with_kv_cache if qo_len is None else single_prefill_with_kv_cache
    q = torch.randn(*(() if qo_len is None else (qo_len,)), 8, HEAD_DIM, device="cuda").bfloat16()
    k, v = torch.randn(2, 30_000, num_kv_heads, HEAD_DIM, device="cuda").bfloat16()

    def check(out: torch.Tensor, kv_len: int) -> None:
        close(out, function(q.cpu(), k[:kv_len].cpu(), v[:kv_len].cpu()))

    for kv_len in (100, 101, 102, 500, 2000, 2001, 9000, 30_000):
        for _ in range(2):
            check(function(q, k[:kv_len], v[:kv_len]), kv_len)
        if kv_len == 2001:
            captured, replay = cuda_graph(lambda: function(q, k[:2001], v[:2001]))
    replay()
    check(captured, 2001)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_requests_of_fp8(kv_layout: str) -> None:
    """Also captured, with the calls of other lengths between replays."""
    graphs = []
    for kv_len in (0, 1, 31, 32, 33, 5000, 131072):
        solver = Solver(matrix.decode(kv_len, HEADS, HEAD_DIM, **BF16, **matrix.E4M3, kv_layout=kv_layout), "cuda")
        out, _ = solver.assert_right()
        graphs.append((*cuda_graph(solver.call), out, solver))  # which keeps the tensors
    for _ in range(3):
        for (captured, _), replay, out, _ in graphs:
            captured.fill_(float("nan"))
            replay()
            assert torch.equal(captured, out)


def test_wrappers_may_be_freed_while_a_graph_is_captured() -> None:
    """Plans refer to each other, so that the garbage collector frees them: at any time, and also in a capture."""
    case = decode((100, 0, 300), kv_dtype=E4M3, dtype="bfloat16", **heads(*HEADS), **dims(HEAD_DIM))
    (kept, inputs), (freed, _) = planned(case, "cuda"), planned(case, "cuda")
    out, lse = torch.full_like(inputs.q, torch.nan), torch.full(inputs.q.shape[:2], torch.nan, device="cuda")
    for wrapper in (kept, freed):
        wrapper.run(inputs.q, *inputs.kv)
    gc.collect()  # graphs that other tests have left must not be freed in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del freed, wrapper
        gc.collect()
        kept.run(inputs.q, *inputs.kv, out=out, lse=lse)
    graph.replay()
    assert_right(case, inputs, out, lse)
