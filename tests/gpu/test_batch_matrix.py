"""The batch wrappers on a GPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from filelock import FileLock

import cute_attn
from cute_attn.runtime import arch as archs
from tests.gpu import marks
from tests.gpu.guarded import assert_outputs_alone_are_written
from tests.support import fuzz, right
from tests.support.batch_case import (
    E4M3,
    SMALL,
    BatchCase,
    call,
    decode,
    dims,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    random_batch_case,
    refusals,
    wrapper,
)
from tests.support.graphs import assert_plans_in_a_row_do_not_race, assert_replays
from tests.support.right import Solver, assert_solved_again

pytestmark = marks.SM80

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_BATCHES", "400"))
FUZZED = int(os.environ.get("CUTE_ATTN_TEST_FUZZED", "10000"))
CHUNK = 20  # cases of one test
REPLAYS = 100


def is_taken(case: BatchCase) -> bool:
    """Whether fa2 takes a case: where it refuses one, the table must say so."""
    expected = refusals(case, make(case, "cuda"), "fa2", archs.for_device(torch.cuda.current_device()))
    if expected:
        with pytest.raises(cute_attn.NotSupported) as error:
            Solver(case, "cuda", backend="fa2").call()  # some features are known to a run alone
        assert set(error.value.refusals) <= set(expected)
    return not expected


def assert_right(case: BatchCase) -> None:
    if is_taken(case):
        assert_solved_again(case, "fa2")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_small(case: BatchCase) -> None:
    assert_right(case)


@pytest.mark.parametrize("first", range(0, RANDOM, CHUNK))
def test_random(first: int) -> None:
    for seed in range(first, first + CHUNK):
        assert_right(random_batch_case(seed))


LARGE = (
    paged((1, 700, 0, 33, 2048), (4000, 700, 12, 65, 5000), mask="causal", **heads(32, 8), **dims(128)),
    paged((300,) * 20, (1500,) * 20, page_size=64, dtype="bfloat16", **heads(8, 2), **dims(256)),
    ragged((1000, 1, 3000), (1000, 9000, 3000), mask="causal", **heads(16, 16), **dims(64)),
    ragged((513, 2), (4097, 3), **heads(4, 4), **dims(192, 128)),
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


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_large(case: BatchCase) -> None:
    assert_right(case)


@pytest.mark.parametrize("case", [case for case in SMALL if case.return_lse and case.rows], ids=lambda case: case.id)
def test_outputs_alone_are_written(case: BatchCase) -> None:
    if is_taken(case):
        solver = Solver(case, "cuda", backend="fa2")
        assert_outputs_alone_are_written(case, solver.inputs, solver.wrapper)


# ---- CUDA graphs

GRAPHED = (
    paged((300, 20, 5, 64), (900,) * 4, mask="causal", **heads(8, 2), **dims(128)),
    paged((64,) * 6, (700,) * 6, page_size=5, **heads(4, 4), fixed_split_size=16),
    paged((17, 40), (500,) * 2, mask="causal", kv_layout="HND", disable_split_kv=True, sinks=True),
    paged((30, 50, 9), (400,) * 3, mask="custom"),
    paged((130, 50, 9), (400,) * 3, mask="items", **heads(8, 2)),
    ragged((300, 20, 5), (900,) * 3, mask="causal", **heads(8, 2), **dims(128)),
    decode((3000,) * 8, **heads(32, 8), **dims(128), dtype="bfloat16"),
    decode((2000,) * 3, q_len=3, **heads(8, 1), **dims(64)),
    decode((4000,) * 2, page_size=1, **heads(4, 4), **dims(128), fixed_split_size=256),
    decode((3000,) * 4, **heads(8, 1), **dims(512), dtype="bfloat16"),
)


@pytest.mark.parametrize("case", GRAPHED, ids=lambda case: case.id)
def test_replays_with_other_lengths(case: BatchCase) -> None:
    assert_replays(case, REPLAYS, backend="fa2")


def test_plans_in_a_row_do_not_race() -> None:
    assert_plans_in_a_row_do_not_race(GRAPHED[0], backend="fa2")


# ---- promises


@pytest.mark.parametrize("kind", ["paged", "ragged", "decode"])
@pytest.mark.parametrize("splits", [{"fixed_split_size": 64}, {"disable_split_kv": True}], ids=["fixed", "none"])
def test_bits_of_a_request_do_not_depend_on_the_batch(kind: str, splits: dict[str, Any]) -> None:
    if kind == "decode":
        case = decode((5000, 12, 0, 777, 3000, 64), page_size=1, **heads(8, 2), **dims(128), **splits)
    else:
        case = BatchCase(
            kind, (100, 1, 40, 7, 300, 64), (5000, 12, 0, 777, 3000, 64), mask="causal", **heads(8, 2), **splits
        )
    solver = Solver(case, "cuda", backend="fa2")
    inputs, (together, lse_together) = solver.inputs, solver.call()
    assert lse_together is not None
    row = 0
    for i, qo_len in enumerate(case.qo_lens):
        arguments = plan_arguments(case, inputs)
        alone = {
            name: arguments[name][i : i + 2]
            for name in ("qo_indptr", "kv_indptr", "paged_kv_indptr", "indptr")
            if name in arguments
        }
        if kind != "decode":
            alone["qo_indptr"] = alone["qo_indptr"] - row
        for name in ("last_page_len", "paged_kv_last_page_len"):
            if name in arguments:
                alone[name] = arguments[name][i : i + 1]
        made = wrapper(case, "cuda", backend="fa2")
        made.reset_workspace_buffer(together.new_empty(1 << 28, dtype=torch.uint8))
        made.plan(**{**arguments, **alone})
        out, lse = made.run(inputs.q[row : row + qo_len], *inputs.kv, return_lse=True)
        assert torch.equal(out, together[row : row + qo_len])
        assert torch.equal(lse, lse_together[row : row + qo_len])
        row += qo_len


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time among the workers of pytest-xdist: each takes 17 GB of the GPU."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "memory.lock"):
        yield
        torch.cuda.empty_cache()


def far_apart(x: torch.Tensor, axis: int) -> torch.Tensor:
    """`x` with the elements of `axis` so far from one another that the last lies beyond 2^31 elements."""
    step = -(-((1 << 31) + 4096) // (x.shape[axis] - 1)) // 64 * 64 + 64
    strides = [0] * x.dim()
    inner = 1
    for i in reversed(range(x.dim())):
        if i != axis:
            strides[i], inner = inner, inner * x.shape[i]
    strides[axis] = step
    whole = torch.empty(step * (x.shape[axis] - 1) + inner, dtype=x.dtype, device=x.device)
    view = whole.as_strided(x.shape, strides)
    view.copy_(x)
    return view


@pytest.mark.parametrize("backend", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize(
    "case", [paged((40, 9), (65, 30)), paged((70, 9), (165, 30), 64), ragged((40, 9), (65, 30)), decode((65, 30))]
)
@pytest.mark.usefixtures("alone")
def test_strides_past_32_bits(case: BatchCase, backend: str) -> None:
    case = dataclasses.replace(case, **heads(4, 2), **dims(128))
    inputs = make(case, "cuda")
    if refusals(case, inputs, backend, archs.for_device(torch.cuda.current_device())):
        pytest.skip(f"{backend} does not run here")
    halves = inputs.kv if case.kind == "ragged" else inputs.kv[0]
    apart = tuple(far_apart(half, 0) for half in halves)
    kv = apart if case.kind == "ragged" else (apart,)
    made = wrapper(case, "cuda", backend=backend)
    made.plan(**plan_arguments(case, inputs))
    out, lse = made.run(far_apart(inputs.q, 0), *kv, out=far_apart(torch.zeros_like(inputs.q), 0), return_lse=True)
    right.assert_right(case, inputs, out, lse)


# ---- bad input


def test_validation_names_request_and_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    case = paged((5, 3, 9), (40, 0, 33), page_size=4)
    inputs = make(case, "cuda")
    bad = inputs.kv_indices.clone()
    bad[12] = 77777
    made = wrapper(case, "cuda", backend="fa2")
    made.plan(**{**plan_arguments(case, inputs), "paged_kv_indices": bad})
    with pytest.raises(cute_attn.ArgumentError, match="page 2 of request 2, is 77777"):
        call(case, inputs, made)
    assert_right(case)


def test_corrupted_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every corrupted input raises a Python error or is valid, and the CUDA context survives."""
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    outcomes = fuzz.run(FUZZED, "cuda", backend="fa2")
    torch.cuda.synchronize()
    assert outcomes.raised > FUZZED // 2
    assert_right(SMALL[0])
