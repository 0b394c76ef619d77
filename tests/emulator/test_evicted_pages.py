"""Page tables may hold -1 for pages that a window hides."""

from __future__ import annotations

import math

import pytest
import torch

from cute_attn import ArgumentError, xqa_batch_decode_with_kv_cache
from tests.support.paged_decode import DIM, HEADS, KERNELS, KV_HEADS, PAGE, attention, emulated, ints, tokens, wrapper

KV_LEN, WINDOW = 110, 20
PAGES = [5, 2, 7, 1, 3, 8, 4]


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_pages_before_a_window_may_be_gone(kernels: tuple[str, str] | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(9, 2, PAGE, KV_HEADS, DIM).bfloat16(), torch.randn(1, HEADS, DIM).bfloat16()
    k, v = tokens(cache, PAGES, KV_LEN)
    want = attention(q, k[-WINDOW - 1 :], v[-WINDOW - 1 :])
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
