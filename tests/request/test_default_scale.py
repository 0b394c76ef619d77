"""The default sm_scale has the bits of `head_dim ** -0.5`, which engines compute in Python and compare with."""

from __future__ import annotations

import pytest
import torch

from cute_attn.request.settings import Call
from cute_attn.request.single import problem
from tests.support.batch_case import decode, paged, ragged
from tests.support.right import planned


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_scale(head_dim: int) -> None:
    dims = {"head_dim_qk": head_dim, "head_dim_vo": head_dim}
    for case in (paged((2,), (3,), **dims), ragged((2,), (3,), **dims), decode((3,), **dims)):
        made, _ = planned(case)
        assert made._planned().settings.sm_scale == head_dim**-0.5
    q = torch.zeros(1, 1, head_dim, dtype=torch.float16)
    assert problem(Call(q, q, q)).settings.sm_scale == head_dim**-0.5
