"""Two ways to one result: fa2 and persistent kernels on the same inputs."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from tests.gpu import marks
from tests.support import cross
from tests.support.batch_case import BatchCase
from tests.support.case import Case, poisoned_memory
from tests.support.persistent_emulated import Target
from tests.support.right import Solver

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_CROSS", "320"))
FIRST = int(os.environ.get("CUTE_ATTN_TEST_FIRST", "0"))
SEEDS = range(FIRST, FIRST + RANDOM, cross.A_KERNEL)


@pytest.mark.parametrize("draw", [cross.batch, cross.single], ids=["batch", "single"])
@pytest.mark.parametrize("first", SEEDS)
@pytest.mark.parametrize("target", marks.PERSISTENT)
def test_backends_are_right(target: Target, first: int, draw: Callable[..., Case | BatchCase]) -> None:
    for seed in range(first, first + cross.A_KERNEL):
        problem = draw(target, seed)
        for backend in cross.backends(target):
            with poisoned_memory():
                Solver(problem, "cuda", backend=backend).assert_right()


@pytest.mark.parametrize("target", marks.PERSISTENT[:1])  # the one that rotates keys
def test_rope_far_from_the_start(target: Target) -> None:
    """Keys at positions up to 2^20."""
    q = torch.randn(80, 2, 128, device="cuda").bfloat16()
    k, v = (torch.randn(1 << 20, 1, 128, device="cuda").bfloat16() for _ in "kv")
    options = {"causal": True, "window_left": 300, "pos_encoding_mode": "ROPE_LLAMA", "return_lse": True}
    names = "fa2", target.kernels
    (o2, lse2), (o3, lse3) = (single_prefill_with_kv_cache(q, k, v, backend=name, **options) for name in names)
    torch.testing.assert_close(o3, o2, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(lse3, lse2, rtol=0, atol=1e-3)
