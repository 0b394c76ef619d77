"""The XQA kernel behind wrappers and single decode, on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

import cute_attn
from tests.gpu import marks
from tests.gpu.guarded import assert_outputs_alone_are_written
from tests.support.batch_case import E4M3, BatchCase, decode, dims, heads
from tests.support.case import Case
from tests.support.graphs import assert_plans_in_a_row_do_not_race, assert_replays
from tests.support.matrix import FULL
from tests.support.matrix import SMALL as MATRIX
from tests.support.right import Solver, assert_solved_again
from tests.support.xqa_batches import SMALL, fp8_answer, fp8_request, is_taken, random_batches

pytestmark = marks.SM80

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_BATCHES", "400"))
CHUNK = 20
REPLAYS = 20  # making 40 NVFP4 requests takes longer than all else here
SINGLE = [problem for problem in (*MATRIX, *FULL) if problem.kind == "decode" and is_taken(problem)]


@pytest.mark.parametrize("batch", SMALL, ids=lambda batch: batch.id)
def test_small(batch: BatchCase) -> None:
    assert_solved_again(batch, "xqa")


@pytest.mark.parametrize("first", range(0, RANDOM, CHUNK))
def test_random(first: int) -> None:
    batches = random_batches(first, 3000, 12)
    for _ in range(CHUNK):
        assert_solved_again(next(batches), "xqa")


LARGE = (
    decode((8192,) * 64, kv_dtype=E4M3, **heads(4, 1), **dims(128), dtype="bfloat16"),
    decode((100000, 3, 0, 700, 131072), kv_dtype=E4M3, **heads(8, 1), **dims(128)),
    decode((70000, 3, 0, 700), kv_dtype="nvfp4", **heads(4, 1), **dims(128), page_size=64, kv_layout="HND"),
    decode(tuple(range(0, 2000, 7)), page_size=1, **heads(4, 2), **dims(64)),
    decode((131072,), **heads(8, 2), **dims(128), dtype="bfloat16", lse_base="ln"),
    decode((3000, 9, 17000), q_len=5, kv_dtype=E4M3, **heads(8, 2), **dims(128)),
)


@pytest.mark.parametrize("batch", LARGE, ids=lambda batch: batch.id)
def test_large(batch: BatchCase) -> None:
    assert_solved_again(batch, "xqa")


@pytest.mark.parametrize("batch", [b for b in SMALL if b.return_lse and b.rows], ids=lambda batch: batch.id)
def test_outputs_alone_are_written(batch: BatchCase) -> None:
    solver = Solver(batch, "cuda", backend="xqa")
    assert_outputs_alone_are_written(batch, solver.inputs, solver.wrapper)


# ---- plans and graphs

GRAPHED = (
    decode((3000,) * 8, kv_dtype=E4M3, **heads(32, 8), **dims(128), dtype="bfloat16"),
    decode((2000,) * 3, q_len=3, **heads(8, 1), **dims(64), window_left=700, sinks=True),
    decode(
        (1500,) * 40, kv_dtype="nvfp4", kv_layout="HND", **heads(4, 1), **dims(128), k_scale=0.5, tensor_scales=True
    ),
    decode((4000,) * 2, page_size=1, **heads(4, 4), **dims(128)),
)


@pytest.mark.parametrize("batch", GRAPHED, ids=lambda batch: batch.id)
def test_replays_with_other_lengths(batch: BatchCase) -> None:
    assert_replays(batch, REPLAYS, backend="xqa")


def test_plans_in_a_row_do_not_race() -> None:
    assert_plans_in_a_row_do_not_race(GRAPHED[0])  # auto's choice


# ---- single requests


@pytest.mark.parametrize("problem", SINGLE, ids=lambda problem: problem.id)
def test_single(problem: Case) -> None:
    assert_solved_again(problem, "xqa")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_requests_of_fp8(kv_layout: str) -> None:
    """Also captured, with the calls of other lengths between replays."""
    graphs = []
    for kv_len in (0, 1, 31, 32, 33, 5000, 131072):
        q, k, v = fp8_request(kv_len, "cuda", kv_layout)
        out = cute_attn.single_decode_with_kv_cache(q, k, v, kv_layout)
        expected = fp8_answer(q, k, v, kv_layout)
        assert float(torch.linalg.vector_norm(out.double() - expected)) <= 5e-3 * float(
            torch.linalg.vector_norm(expected)
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = cute_attn.single_decode_with_kv_cache(q, k, v, kv_layout)
        graphs.append((graph, captured, out, (q, k, v)))
    for _ in range(3):
        for graph, captured, out, _ in graphs:
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, out)
