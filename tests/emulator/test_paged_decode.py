"""Paged decode calls on every kernel that takes them: page tables that hold -1 for pages that a window hides, and
finite sinks whose base-2 values exceed fp32.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from cute_attn import ArgumentError, BatchDecodeWithPagedKVCacheWrapper, xqa_batch_decode_with_kv_cache
from cute_attn.emulator.settings import using
from tests.support.dense_attention import attention, seen

KERNELS = [
    pytest.param(None, id="reference"),
    *(
        pytest.param((arch, kernels), id=f"{arch} {kernels}")
        for arch, kernels in (
            *(("sm_90a", kernels) for kernels in ("fa2", "fa3", "xqa")),
            *(("sm_100a", kernels) for kernels in ("fa4", "xqa")),
        )
    ),
]
PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 64


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def wrapper(kernels: tuple[str, str] | None) -> BatchDecodeWithPagedKVCacheWrapper:
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    return BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", backend="emulator" if kernels else "reference")


def emulated(kernels: tuple[str, str] | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if kernels is None else using(kernels[0], kernels=kernels[1])


def tokens(cache: torch.Tensor, pages: list[int], kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of a request."""
    k, v = cache[pages].unbind(1)
    return k.flatten(0, 1)[:kv_len], v.flatten(0, 1)[:kv_len]


KV_LEN, WINDOW = 110, 20
PAGES = [5, 2, 7, 1, 3, 8, 4]


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_pages_before_a_window_may_be_gone(kernels: tuple[str, str] | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(9, 2, PAGE, KV_HEADS, DIM).bfloat16(), torch.randn(1, HEADS, DIM).bfloat16()
    k, v = tokens(cache, PAGES, KV_LEN)
    want, _ = attention(q, k, v, seen(1, KV_LEN, window_left=WINDOW))
    pages = torch.tensor(PAGES, dtype=dtype)
    pages[: (KV_LEN - WINDOW - 1) // PAGE] = -1
    made = wrapper(kernels)
    with emulated(kernels):
        made.plan(ints(0, 7), pages, ints(KV_LEN - 6 * PAGE), HEADS, KV_HEADS, DIM, PAGE, window_left=WINDOW,
                  q_data_type=torch.bfloat16)  # fmt: skip
        out = made.run(q, cache)
    assert (out.double() - want).abs().max() < 1e-2


@pytest.mark.emulator
@pytest.mark.parametrize("entry", [None, -1], ids=["in place", "gone"])
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("kernels", KERNELS[1:])
def test_nan_in_hidden_slots_stays_there(kernels: tuple[str, str], page_size: int, entry: int | None) -> None:
    """One key is seen, the first of its page: slots behind it are not written, pages before it may be gone."""
    torch.manual_seed(0)
    pages = [5, 2, 7, 1]
    cache, q = torch.randn(9, 2, page_size, KV_HEADS, DIM).bfloat16(), torch.randn(1, HEADS, DIM).bfloat16()
    cache[pages[-1], :, 1:] = math.nan
    want = cache[pages[-1], 1, :1].repeat_interleave(HEADS // KV_HEADS, 1)
    table = ints(*(pages if entry is None else [entry] * 3 + pages[3:]))
    made = wrapper(kernels)
    with emulated(kernels):
        made.plan(ints(0, 4), table, ints(1), HEADS, KV_HEADS, DIM, page_size, window_left=0,
                  q_data_type=torch.bfloat16)  # fmt: skip
        out = made.run(q, cache)
    torch.testing.assert_close(out, want)


def test_a_page_that_a_window_shows_is_checked() -> None:
    cache, q = torch.randn(9, 2, PAGE, KV_HEADS, DIM).half(), torch.randn(1, HEADS, DIM).half()
    hidden = (KV_LEN - WINDOW - 1) // PAGE
    for gone, error in ((hidden - 1, None), (hidden, f"page {hidden} of request 0")):
        pages = ints(*PAGES)
        pages[: gone + 1] = -1
        made = wrapper(None)
        made.plan(ints(0, 7), pages, ints(KV_LEN - 6 * PAGE), HEADS, KV_HEADS, DIM, PAGE, window_left=WINDOW,
                  q_data_type=torch.float16)  # fmt: skip
        arguments = (q, cache, torch.zeros(64), pages[None], ints(KV_LEN), KV_LEN)
        for call in (
            lambda made=made: made.run(q, cache),
            lambda a=arguments: xqa_batch_decode_with_kv_cache(*a, bmm1_scale=0.125, window_left=WINDOW),
        ):
            if error is None:
                assert call().isfinite().all()
            else:
                with pytest.raises(ArgumentError, match=error):
                    call()


@pytest.mark.emulator
@pytest.mark.parametrize("sink", [2e38, 2.5e38, 3.4e38])
@pytest.mark.parametrize("kernels", KERNELS)
def test_huge_sinks_take_all_the_weight(kernels: tuple[str, str] | None, sink: float) -> None:
    """Outputs are 0, and lse is the sink."""
    torch.manual_seed(0)
    cache, q = torch.randn(4, 2, PAGE, KV_HEADS, DIM).bfloat16(), torch.randn(2, HEADS, DIM).bfloat16()
    sinks = torch.full((HEADS,), sink)
    sinks[1] = -math.inf  # this head has no sink
    made = wrapper(kernels)
    with emulated(kernels):
        made.plan(ints(0, 2, 4), ints(0, 1, 2, 3), ints(4, 14), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16)
        out, lse = made.run(q, cache, return_lse=True, sinks=sinks)
    want = torch.full((2, HEADS), sink, dtype=torch.float64).mul(math.log2(math.e)).float()  # beyond fp32: +inf
    others = [0, 2, 3]
    assert not out[:, others].any()
    torch.testing.assert_close(lse[:, others], want[:, others])
    for i, (pages, kv_len) in enumerate((([0, 1], 20), ([2, 3], 30))):
        answer, _ = attention(q[i : i + 1], *tokens(cache, pages, kv_len), seen(1, kv_len))
        assert (out[i, 1].double() - answer[0, 1]).abs().max() < 1e-2
