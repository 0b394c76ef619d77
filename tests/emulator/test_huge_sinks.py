"""A finite sink whose base-2 value exceeds fp32 takes all the weight: outputs are 0, and lse is the sink."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.paged_decode import DIM, HEADS, KERNELS, KV_HEADS, PAGE, attention, emulated, ints, tokens, wrapper


@pytest.mark.emulator
@pytest.mark.parametrize("sink", [2e38, 2.5e38, 3.4e38])
@pytest.mark.parametrize("kernels", KERNELS)
def test_huge_sinks_take_all_the_weight(kernels: tuple[str, str] | None, sink: float) -> None:
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
        k, v = tokens(cache, pages, kv_len)
        assert (out[i, 1].double() - attention(q[i : i + 1], k, v)[0, 1]).abs().max() < 1e-2
