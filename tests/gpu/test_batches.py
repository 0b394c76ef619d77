"""Calls on a GPU: bits that do not depend on the batch, large strides and positions, bad input."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from filelock import FileLock

from cute_attn import single_prefill_with_kv_cache
from cute_attn.runtime import arch as archs
from tests.gpu import marks
from tests.support import fuzz, right
from tests.support.batch_case import (
    SMALL,
    BatchCase,
    decode,
    dims,
    heads,
    make,
    paged,
    plan_arguments,
    ragged,
    refusals,
    wrapper,
)
from tests.support.right import Solver, assert_solved_again

pytestmark = marks.GPU

FUZZED = int(os.environ.get("CUTE_ATTN_TEST_FUZZED", "10000"))


# ---- promises


@pytest.mark.parametrize("backend", ["fa2", pytest.param("fa3", marks=marks.FA3_GPU)])
@pytest.mark.parametrize("kind", ["paged", "ragged", "decode"])
@pytest.mark.parametrize("splits", [{"fixed_split_size": 64}, {"disable_split_kv": True}], ids=["fixed", "none"])
def test_bits_of_a_request_do_not_depend_on_the_batch(kind: str, splits: dict[str, Any], backend: str) -> None:
    if kind == "decode":
        case = decode((5000, 12, 0, 777, 3000, 64), page_size=1, **heads(8, 2), **dims(128), **splits)
    else:
        case = BatchCase(
            kind, (100, 1, 40, 7, 300, 64), (5000, 12, 0, 777, 3000, 64), mask="causal", **heads(8, 2), **splits
        )
    solver = Solver(case, "cuda", backend=backend)
    inputs, (together, lse_together) = solver.inputs, solver.call()
    assert lse_together is not None
    row = 0
    for i, qo_len in enumerate(case.qo_lens):
        arguments = plan_arguments(case, inputs)
        alone = {name: x[i : i + 2] for name, x in arguments.items() if name.endswith("indptr")}
        alone |= {name: x[i : i + 1] for name, x in arguments.items() if name.endswith("last_page_len")}
        if kind != "decode":
            alone["qo_indptr"] = alone["qo_indptr"] - row
        made = wrapper(case, "cuda", backend=backend)
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
    if refusals(case, backend, archs.for_device(torch.cuda.current_device())):
        pytest.skip(f"{backend} does not run here")
    halves = inputs.kv if case.kind == "ragged" else inputs.kv[0]
    apart = tuple(far_apart(half, 0) for half in halves)
    kv = apart if case.kind == "ragged" else (apart,)
    made = wrapper(case, "cuda", backend=backend)
    made.plan(**plan_arguments(case, inputs))
    out, lse = made.run(far_apart(inputs.q, 0), *kv, out=far_apart(torch.zeros_like(inputs.q), 0), return_lse=True)
    right.assert_right(case, inputs, out, lse)


@pytest.mark.parametrize("backend", [pytest.param("fa3", marks=marks.FA3_GPU)])  # which rotates keys itself
def test_rope_far_from_the_start(backend: str) -> None:
    """Keys at positions up to 2^20, beside fa2."""
    q = torch.randn(80, 2, 128, device="cuda").bfloat16()
    k, v = (torch.randn(1 << 20, 1, 128, device="cuda").bfloat16() for _ in "kv")
    options = {"causal": True, "window_left": 300, "pos_encoding_mode": "ROPE_LLAMA", "return_lse": True}
    names = "fa2", backend
    (o2, lse2), (o3, lse3) = (single_prefill_with_kv_cache(q, k, v, backend=name, **options) for name in names)
    torch.testing.assert_close(o3, o2, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(lse3, lse2, rtol=0, atol=1e-3)


# ---- bad input


def test_corrupted_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every corrupted input raises a Python error or is valid, and the CUDA context survives."""
    monkeypatch.setenv("CUTE_ATTN_VALIDATE", "1")
    outcomes = fuzz.run(FUZZED, "cuda", backend="fa2")
    torch.cuda.synchronize()
    assert outcomes.raised > FUZZED // 2
    assert_solved_again(SMALL[0], "fa2")
