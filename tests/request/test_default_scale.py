"""The default sm_scale has the bits of `head_dim ** -0.5`, which engines compute in Python and compare with."""

from __future__ import annotations

import math

import pytest
import torch

import cute_attn
from cute_attn.request.settings import Call
from cute_attn.request.single import problem
from tests.support.batch_case import decode, paged, ragged
from tests.support.right import planned

DIFFERENT = [d for d in range(8, 513, 8) if d**-0.5 != 1 / math.sqrt(d)]


def test_the_two_formulas_differ() -> None:
    assert {96, 128, 192} & set(DIFFERENT)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_scale(head_dim: int) -> None:
    dims = {"head_dim_qk": head_dim, "head_dim_vo": head_dim}
    for case in (paged((2,), (3,), **dims), ragged((2,), (3,), **dims), decode((3,), **dims)):
        made, _ = planned(case)
        assert made._planned().settings.sm_scale == head_dim**-0.5
    q = torch.zeros(1, 1, head_dim, dtype=torch.float16)
    assert problem(Call(q, q, q)).settings.sm_scale == head_dim**-0.5


def test_results_of_default_and_named_scale_are_equal_bits() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 2, 96).half() for _ in range(3))
    named = cute_attn.single_prefill_with_kv_cache(q, k, v, sm_scale=96**-0.5)
    assert torch.equal(cute_attn.single_prefill_with_kv_cache(q, k, v), named)
