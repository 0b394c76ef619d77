"""Outputs in fp8 on the wgmma kernels and the merge of their partials."""

from __future__ import annotations

import pytest
import torch

import cute_attn
from cute_attn.emulator import Schedule, using
from tests.support import narrow_outputs
from tests.support.batch_case import BatchCase
from tests.support.case import Case
from tests.support.persistent_emulated import name
from tests.support.schedules import all_alike, in_turn

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(("problem", "schedule"), in_turn(narrow_outputs.PROBLEMS, structure=all_alike), ids=name)
def test_rounded_once(problem: Case | BatchCase, schedule: Schedule) -> None:
    with using("sm_90a", kernels="fa3", schedule=schedule, sms=8):
        narrow_outputs.assert_rounded(problem, "cpu", "emulator")


@pytest.mark.parametrize(("head_dim", "o_dtype"), [(64, torch.float8_e4m3fn), (80, torch.float8_e5m2)])
def test_of_fp8_products(head_dim: int, o_dtype: torch.dtype) -> None:
    """q, k and v in fp8, whose accumulators hold even and odd dimensions apart."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((140, 2, head_dim), (200, 1, head_dim), (200, 1, head_dim))
    q, k, v = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for shape in shapes)
    with using("sm_90a", kernels="fa3"):
        wide, out = (
            cute_attn.single_prefill_with_kv_cache(q, k, v, causal=True, o_dtype=dtype, backend="emulator")
            for dtype in (torch.float32, o_dtype)
        )
    assert torch.equal(wide.to(o_dtype).view(torch.uint8), out.view(torch.uint8))
