"""Paged decode calls on every kernel that takes them: page tables that hold -1 for pages that a window hides, and
finite sinks whose base-2 values exceed fp32.
"""

from __future__ import annotations

import math

import pytest
import torch

from cute_attn import ArgumentError, xqa_batch_decode_with_kv_cache
from tests.support.batch_case import BatchCase, BatchInputs, call, decode, dims, heads, make
from tests.support.dense_attention import attention, seen
from tests.support.executors import REFERENCE, Executor, emulated
from tests.support.right import assert_right

EMULATED = [
    *(emulated("sm_90a", kernels) for kernels in ("fa2", "fa3", "xqa")),
    *(emulated("sm_100a", kernels) for kernels in ("fa4", "xqa")),
]
PAGE, KV_LEN, WINDOW = 16, 110, 20


def name(on: Executor) -> str:
    return f"{on.arch} {on.kernels}" if on.arch else on.name


def decoded(kv_lens: tuple[int, ...], page_size: int = PAGE, **more: object) -> BatchCase:
    return decode(kv_lens, page_size, cache="one", **{"dtype": "bfloat16", **more}, **heads(4, 2), **dims(64))


def made(case: BatchCase) -> BatchInputs:
    """Pages of no request hold finite numbers; -1 may stand for one of them."""
    inputs = make(case)
    (cache,) = inputs.kv
    cache[[page for page in range(len(cache)) if page not in inputs.kv_indices]] = 0.0
    return inputs


def solve(case: BatchCase, inputs: BatchInputs, on: Executor) -> None:
    with on.active():
        assert_right(case, inputs, *call(case, inputs, backend=on.backend))


@pytest.mark.emulator
@pytest.mark.parametrize("indices", ["int32", "int64"])
@pytest.mark.parametrize("on", [REFERENCE, *EMULATED], ids=name)
def test_pages_before_a_window_may_be_gone(on: Executor, indices: str) -> None:
    case = decoded((KV_LEN,), window_left=WINDOW, indices=indices)
    inputs = made(case)
    inputs.kv_indices[: (KV_LEN - WINDOW - 1) // PAGE] = -1
    solve(case, inputs, on)


@pytest.mark.emulator
@pytest.mark.parametrize("gone", [False, True], ids=["in place", "gone"])
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("on", EMULATED, ids=name)
def test_nan_in_hidden_slots_stays_there(on: Executor, page_size: int, gone: bool) -> None:
    """One key is seen, the first of its page: slots behind it are not written, pages before it may be gone."""
    case = decoded((3 * page_size + 1,), page_size, window_left=0)
    inputs = made(case)
    if gone:
        inputs.kv_indices[:3] = -1
    solve(case, inputs, on)


def test_a_page_that_a_window_shows_is_checked() -> None:
    case = decoded((KV_LEN,), window_left=WINDOW, dtype="float16")
    hidden = (KV_LEN - WINDOW - 1) // PAGE
    for gone, error in ((hidden - 1, None), (hidden, f"page {hidden} of request 0")):
        inputs = made(case)
        inputs.kv_indices[: gone + 1] = -1
        lengths = torch.tensor([KV_LEN], dtype=torch.int32)
        arguments = (inputs.q, *inputs.kv, torch.zeros(64), inputs.kv_indices[None], lengths, KV_LEN)
        for run in (
            lambda inputs=inputs: call(case, inputs, backend="reference")[0],
            lambda a=arguments: xqa_batch_decode_with_kv_cache(*a, bmm1_scale=0.125, window_left=WINDOW),
        ):
            if error is None:
                assert run().isfinite().all()
            else:
                with pytest.raises(ArgumentError, match=error):
                    run()


@pytest.mark.emulator
@pytest.mark.parametrize("sink", [2e38, 2.5e38, 3.4e38])
@pytest.mark.parametrize("on", [REFERENCE, *EMULATED], ids=name)
def test_huge_sinks_take_all_the_weight(on: Executor, sink: float) -> None:
    """Outputs are 0, and lse is the sink."""
    case, others = decoded((20, 30), sinks=True), [0, 2, 3]
    inputs = make(case)
    assert inputs.sinks is not None
    inputs.sinks[others], inputs.sinks[1] = sink, -math.inf  # this head has no sink
    with on.active():
        out, lse = call(case, inputs, backend=on.backend)
    assert lse is not None
    want = torch.full((2, 4), sink, dtype=torch.float64).mul(math.log2(math.e)).float()  # beyond fp32: +inf
    assert not out[:, others].any()
    torch.testing.assert_close(lse[:, others], want[:, others])
    for found, request in zip(out.double(), inputs.requests, strict=True):
        answer, _ = attention(request.q, request.k, request.v, seen(1, len(request.k)))
        assert (found[1] - answer[0, 1]).abs().max() < 1e-2
