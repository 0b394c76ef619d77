"""The matrices of problems on a GPU, by backend: right with NaN around and the same bits twice, or refused as the
capability table says. fp8, every call, every argument. What calls write, captured runs, plans in a row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from cute_attn import NotSupported
from cute_attn.dispatch import capabilities
from cute_attn.errors import Refusal
from cute_attn.runtime import arch as archs
from tests.gpu import marks
from tests.support import batch_case, fp8_case, matrix, narrow_outputs, persistent_emulated, xqa_batches
from tests.support.batch_case import E4M3, BatchCase, decode, dims, heads, paged, ragged, random_batch_case
from tests.support.executors import needs_gpu
from tests.support.flashinfer_calls import ENTRY_OF, calls
from tests.support.graphs import (
    CapturedLayers,
    assert_plans_in_a_row_do_not_race,
    assert_replays,
    cuda_graph,
    smaller,
)
from tests.support.honour import CALLS, IDS, Perturbation, honour
from tests.support.matrix import BF16, FULL
from tests.support.persistent_emulated import BATCHES, FA3, GATHERED, LONG, of_8_bits
from tests.support.right import Solver, assert_right, assert_solved, assert_solved_again

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_BATCHES", "400"))
CHUNK = 20  # random problems of one test
BACKENDS = ("fa2", "fa3", "fa4", "auto")
CHANGES = {"nvfp4": persistent_emulated.NVFP4, "rope": persistent_emulated.ROPE}  # what fa3's transform warps do
ITEMS: dict[str, Any] = {"mask": "items"}


def params(rows: Iterable[tuple[str, Any]]) -> list[Any]:
    """Cases of a backend and a problem, on the GPUs that run the backend."""
    return [pytest.param(*row, id=f"{row[0]}-{row[1].id}", marks=marks.OF[row[0]]) for row in rows]


def refusals(problem: BatchCase, backend: str) -> list[Refusal]:
    """The reasons of the table against a problem here; of "auto" only where no backend is left."""
    arch = archs.for_device(torch.cuda.current_device())
    names = [name for name in marks.OF if name != "auto"] if backend == "auto" else [backend]
    found = [batch_case.refusals(problem, name, arch) for name in names]
    return [reason for reasons in found for reason in reasons] if all(found) else []


def assert_honoured(problem: BatchCase, backend: str) -> None:
    """The backend solves it; where it refuses, the table must say so."""
    expected = refusals(problem, backend)
    if not expected:
        return assert_solved_again(problem, backend)
    with pytest.raises(NotSupported) as error:
        Solver(problem, "cuda", backend=backend).call()  # some features are known to a run alone
    no_keys = problem.single and not any(problem.kv_lens)  # whose strides may be 0
    assert no_keys or set(error.value.refusals) <= set(expected)


# ---- all problems of a matrix, and larger ones

LARGE_PREFILL = (  # also with keys of 8 bits, NVFP4 keys, rotated keys
    paged((1, 700, 0, 33, 2048), (4000, 700, 12, 65, 5000), mask="causal", **heads(32, 8), **dims(128)),
    paged((300,) * 20, (1500,) * 20, page_size=64, dtype="bfloat16", **heads(8, 2), **dims(256)),
    paged((513, 2), (4097, 3), page_size=1, dtype="bfloat16", **heads(4, 4), **dims(128)),
    ragged((1000, 1, 3000), (1000, 9000, 3000), mask="causal", dtype="bfloat16", **heads(8, 2), **dims(128)),
    ragged((513, 2), (4097, 3), **heads(4, 4), **dims(192, 128)),
)
LARGE = (
    *LARGE_PREFILL,
    ragged((1000, 1, 3000), (1000, 9000, 3000), mask="causal", **heads(16, 16), **dims(64)),
    decode((8192,) * 16, **heads(8, 2), **dims(128), dtype="bfloat16"),
    decode((100000, 3, 0, 700, 20000), **heads(8, 1), **dims(128)),
    decode(tuple(range(0, 2000, 7)), page_size=1, **heads(4, 2), **dims(64)),
    decode((3000, 9, 17000), q_len=5, **heads(8, 2), **dims(128), pos_encoding_mode="ROPE_LLAMA"),
    paged((1, 700, 0, 33), (4000, 700, 12, 65), mask="causal", dtype="bfloat16", **heads(32, 4), **dims(512)),
    paged((300,) * 9, (1500,) * 9, page_size=64, kv_dtype=E4M3, dtype="bfloat16", **heads(8, 2), **dims(512)),
    ragged((513, 2), (4097, 3), **heads(4, 4), **dims(512)),
    decode((50000, 3, 0, 700), dtype="bfloat16", **heads(32, 4), **dims(512)),
    decode((20000, 3, 0, 700), q_len=2, kv_dtype=E4M3, page_size=64, **heads(8, 1), **dims(512)),
    paged((1, 700, 0, 33), (4000, 700, 12, 65), mask="causal", dtype="bfloat16", **heads(8, 2), **dims(80)),
    paged((513, 2), (4097, 3), page_size=1, mask="causal", **heads(4, 4), **dims(112)),
    ragged((513, 2), (4097, 3), mask="causal", **heads(4, 4), **dims(72)),
)
LARGE_DECODE = (
    decode((8192,) * 64, kv_dtype=E4M3, **heads(4, 1), **dims(128), dtype="bfloat16"),
    decode((100000, 3, 0, 700, 131072), kv_dtype=E4M3, **heads(8, 1), **dims(128)),
    decode((70000, 3, 0, 700), kv_dtype="nvfp4", **heads(4, 1), **dims(128), page_size=64, kv_layout="HND"),
    decode(tuple(range(0, 2000, 7)), page_size=1, **heads(4, 2), **dims(64)),
    decode((131072,), **heads(8, 2), **dims(128), dtype="bfloat16", lse_base="ln"),
    decode((3000, 9, 17000), q_len=5, kv_dtype=E4M3, **heads(8, 2), **dims(128)),
)
LARGE_ITEMS = (
    paged((4000, 0, 700, 33), (6000, 12, 700, 900), **ITEMS, longest_item=40, **BF16, **heads(32, 8), **dims(128)),
    paged((1500, 64), (9000, 3000), 1, **ITEMS, longest_item=200, **BF16, **heads(8, 2), **dims(128)),
    paged((900, 300), (4000, 300), 64, **ITEMS, window_left=700, longest_item=90, **heads(8, 8), **dims(256)),
    paged((900, 300), (4000, 300), 16, **ITEMS, kv_dtype=E4M3, longest_item=90, **heads(8, 2), **dims(128)),
    ragged((2000, 30), (3000, 8000), **ITEMS, longest_item=3000, sinks=True, **heads(8, 1), **dims(192, 128)),
    paged((20, 5), (60000, 9000), 16, **ITEMS, **BF16, **heads(8, 1), **dims(128)),
)
SINGLE_DECODE = [x for x in (*matrix.SMALL, *FULL) if x.kind == "single_decode" and xqa_batches.is_taken(x)]
PERSISTENT = *FULL, *LONG, *batch_case.SMALL, *BATCHES, *GATHERED
PREPARED_KEYS: tuple[BatchCase, ...] = (
    *(*of_8_bits(matrix.SMALL), *of_8_bits(FULL[::4])),
    *of_8_bits((*batch_case.SMALL, *LARGE_PREFILL)),
    *(*persistent_emulated.NVFP4_BATCHES, *persistent_emulated.ROPE_BATCHES),
    *(dataclasses.replace(batch, **change) for change in CHANGES.values() for batch in LARGE_PREFILL),
)
MATRICES: dict[str, tuple[BatchCase, ...]] = {
    "fa2": (*FULL, *batch_case.SMALL, *LARGE, *LARGE_ITEMS),
    "xqa": (*xqa_batches.SMALL, *LARGE_DECODE, *SINGLE_DECODE),
    "fa3": (*PERSISTENT, *PREPARED_KEYS, *LARGE_ITEMS),
    "fa4": (*PERSISTENT, *LARGE_ITEMS),
    "auto": LARGE_ITEMS,
}


@pytest.mark.parametrize(
    ("backend", "problem"), params((name, problem) for name, own in MATRICES.items() for problem in own)
)
def test_matrix(backend: str, problem: BatchCase) -> None:
    assert_honoured(problem, backend)


# ---- random ones


def batches(first: int, max_len: int = 700) -> Iterator[BatchCase]:
    return (random_batch_case(seed, max_len) for seed in range(first, first + CHUNK))


def plain(first: int) -> Iterator[BatchCase]:
    """Batches with keys of 16 bits, which nothing rotates."""
    return (dataclasses.replace(x, kv_dtype=None, pos_encoding_mode="NONE") for x in batches(first))


def prepared(first: int, change: dict[str, Any]) -> Iterator[BatchCase]:
    changed = (dataclasses.replace(x, **change) for x in plain(first))
    return (x for x in changed if FA3.takes(x))


def items(first: int, **changes: Any) -> Iterator[BatchCase]:
    for seed, batch in enumerate(batches(first, 1200), first):
        if batch.kind != "decode":
            longest = random.Random(seed).choice((1, 10, 60, 400))
            yield dataclasses.replace(batch, **ITEMS, longest_item=longest, **changes)


DRAWS: dict[str, Callable[[int], Iterable[BatchCase]]] = {  # by the first of a test's seeds
    "single": lambda first: map(matrix.random_case, range(first, first + CHUNK)),
    "batch": batches,
    "decode": lambda first: itertools.islice(xqa_batches.random_batches(first, 3000, 12), CHUNK),
    "8 bits": lambda first: of_8_bits(dataclasses.replace(x, kv_dtype=None) for x in batches(first)),
    **{name: functools.partial(prepared, change=change) for name, change in CHANGES.items()},
    "items": items,
    "items alone": functools.partial(items, pos_encoding_mode="NONE"),
}
DRAWN = [  # backend, what is drawn, how many seeds
    *(("fa2", "single", 200), ("xqa", "single", 200), ("fa2", "batch", RANDOM), ("xqa", "decode", RANDOM)),
    *(("fa2", "items", 60), ("auto", "items", 60), ("fa3", "8 bits", 300), *(("fa3", name, 100) for name in CHANGES)),
    *((name, draw, 300) for name in ("fa3", "fa4") for draw in ("single", "batch")),
    *((name, "items alone", 60) for name in ("fa3", "fa4")),
]


@pytest.mark.parametrize(
    ("backend", "draw", "first"),
    [
        pytest.param(backend, draw, first, marks=marks.OF[backend])
        for backend, draw, seeds in DRAWN
        for first in range(0, seeds, CHUNK)
    ],
)
def test_random(backend: str, draw: str, first: int) -> None:
    for problem in DRAWS[draw](first):
        assert_honoured(problem, backend)


# ---- fp8 queries, fp8 outputs, every call and argument

FP8 = (*fp8_case.SMALL, *fp8_case.VARIED, *fp8_case.CUT, *fp8_case.LONG, *fp8_case.LARGE)


@pytest.mark.parametrize(("backend", "case"), params(itertools.product(("fa2", "fa3", "fa4"), FP8)))
def test_fp8(backend: str, case: BatchCase) -> None:
    """Every element is within what the rounding of probabilities explains."""
    if refusals(case, backend):
        pytest.skip(f"{backend} does not run this here")
    assert_solved(case, "cuda", backend=backend)


@pytest.mark.parametrize(("backend", "problem"), params(("fa3", problem) for problem in narrow_outputs.PROBLEMS))
def test_outputs_in_fp8_are_rounded_once(backend: str, problem: BatchCase) -> None:
    narrow_outputs.assert_rounded(problem, "cuda", backend)


@needs_gpu
@pytest.mark.parametrize("name", ENTRY_OF)
def test_flashinfers_calls_are_those_of_the_cpu(name: str) -> None:
    expected, found = (calls(device)[name]("", {}) for device in ("cpu", "cuda"))
    assert len(found) == len(expected)
    for on_gpu, on_cpu in zip(found, expected, strict=True):
        assert on_gpu.is_cuda
        tolerance = 2e-2 if on_cpu.dtype == torch.bfloat16 else 4e-3
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=tolerance, atol=tolerance)


@needs_gpu
@pytest.mark.parametrize(("kind", "perturbation"), CALLS, ids=IDS)
@pytest.mark.parametrize("backend", [b.name for b in capabilities.BACKENDS if b.archs])
def test_honour(backend: str, kind: str, perturbation: Perturbation) -> None:
    honour(kind, perturbation, backend, "cuda", archs.for_device(torch.cuda.current_device()))


# ---- memory beside outputs

GUARD = 512
UNTOUCHED = 7.0


def guarded(problem: BatchCase) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """`out` with gaps after heads and tokens, `lse`, and the larger buffers around them, which tell other writes."""
    rows, heads, dim = problem.rows, problem.num_qo_heads, problem.head_dim_vo
    strides, dtype = (heads * (dim + 8) + 16, dim + 8, 1), getattr(torch, problem.o_dtype or problem.dtype)
    out = torch.full((2 * GUARD + rows * strides[0],), UNTOUCHED, dtype=dtype, device="cuda")
    lse = torch.full((2 * GUARD + rows * heads,), UNTOUCHED, device="cuda")
    inner = lse[GUARD : GUARD + rows * heads].view(rows, heads)
    return out.as_strided((rows, heads, dim), strides, GUARD), inner, (out, lse)


WRITTEN = {
    "fa2": [x for x in (*matrix.SMALL, *batch_case.SMALL) if x.return_lse and x.rows],
    "xqa": [batch for batch in xqa_batches.SMALL if batch.return_lse and batch.rows],
}


@pytest.mark.parametrize(("backend", "problem"), params((name, x) for name, own in WRITTEN.items() for x in own))
def test_outputs_alone_are_written(backend: str, problem: BatchCase) -> None:
    if refusals(problem, backend):
        return
    solver = Solver(problem, "cuda", backend=backend)
    out, lse, buffers = guarded(problem)
    out[: problem.first], lse[: problem.first] = 0.0, -torch.inf  # rows of no request: the caller's
    out, lse = (out[0], lse[0]) if problem.kind == "single_decode" else (out, lse)
    returned = solver.call(out=out, lse=lse)
    assert returned[0].data_ptr() == out.data_ptr()
    assert_right(problem, solver.inputs, out, lse)
    for written in (out, lse):
        written.fill_(UNTOUCHED)
    assert all(bool((buffer == UNTOUCHED).all()) for buffer in buffers)


# ---- CUDA graphs, plans in a row

REPLAYS = {"fa2": 100, "xqa": 20, "items": 30}  # making 40 NVFP4 requests takes longer than all else here
GRAPHED = {
    "fa2": (
        paged((300, 20, 5, 64), (900,) * 4, mask="causal", **heads(8, 2), **dims(128)),
        paged((64,) * 6, (700,) * 6, page_size=5, **heads(4, 4), fixed_split_size=16),
        paged((17, 40), (500,) * 2, mask="causal", kv_layout="HND", disable_split_kv=True, sinks=True),
        paged((30, 50, 9), (400,) * 3, mask="custom"),
        ragged((300, 20, 5), (900,) * 3, mask="causal", **heads(8, 2), **dims(128)),
        decode((3000,) * 8, **heads(32, 8), **dims(128), dtype="bfloat16"),
        decode((2000,) * 3, q_len=3, **heads(8, 1), **dims(64)),
        decode((4000,) * 2, page_size=1, **heads(4, 4), **dims(128), fixed_split_size=256),
        decode((3000,) * 4, **heads(8, 1), **dims(512), dtype="bfloat16"),
        decode((3000,) * 3, kv_dtype=E4M3, cache="halves", **heads(4, 2)),  # rows at multiples of 8 bytes
    ),
    "xqa": (
        decode((3000,) * 8, kv_dtype=E4M3, **heads(32, 8), **dims(128), dtype="bfloat16"),
        decode((2000,) * 3, q_len=3, **heads(8, 1), **dims(64), window_left=700, sinks=True),
        decode(
            (1500,) * 40, kv_dtype="nvfp4", kv_layout="HND", **heads(4, 1), **dims(128), k_scale=0.5, tensor_scales=True
        ),
        decode((4000,) * 2, page_size=1, **heads(4, 4), **dims(128)),
    ),
}
GRAPHED_ITEMS = (
    paged((300, 20, 5, 64), (900,) * 4, **ITEMS, **heads(8, 2), **dims(128)),
    ragged((300, 20, 5), (900,) * 3, **ITEMS, longest_item=100, **heads(8, 2)),
)
LAYERED = (
    paged((300, 5, 40), (900, 700, 333), page_size=16, **heads(4, 2)),
    ragged((300, 5, 40), (900, 700, 333), **heads(4, 2)),
    decode((900, 700, 333), page_size=1, **heads(4, 2)),
    decode((900, 700, 333), page_size=16, q_len=3, **heads(4, 2), dtype="bfloat16"),
)
REPLAYED = [(name, x) for name, own in GRAPHED.items() for x in own] + list(itertools.product(BACKENDS, GRAPHED_ITEMS))
IN_A_ROW = [("fa2", GRAPHED["fa2"][0]), ("auto", GRAPHED["xqa"][0]), ("auto", GRAPHED_ITEMS[0])]


@pytest.mark.parametrize(("backend", "case"), params(REPLAYED))
def test_replays_with_other_lengths(backend: str, case: BatchCase) -> None:
    if refusals(case, backend):
        pytest.skip(f"{backend} does not run this here")
    assert_replays(case, REPLAYS["items" if case in GRAPHED_ITEMS else backend], backend=backend)


@pytest.mark.parametrize(("backend", "case"), params(itertools.product(("auto", "fa2"), LAYERED)))
def test_layers_of_one_plan(backend: str, case: BatchCase) -> None:
    """As engines capture them: options left open by the plan, fewer heads than planned."""
    captured = CapturedLayers(case, "cuda", cuda_graph, backend=backend)
    for other in smaller(case, 6):
        captured.replay(other)


@pytest.mark.parametrize(("backend", "case"), params(IN_A_ROW))
def test_plans_in_a_row_do_not_race(backend: str, case: BatchCase) -> None:
    assert_plans_in_a_row_do_not_race(case, backend=backend)
