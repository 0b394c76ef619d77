"""fp8 on persistent kernels, from their PTX: every element within what the rounding of probabilities explains. Outputs
in fp8, which are rounded once.
"""

from __future__ import annotations

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from cute_attn.emulator import Schedule, using
from tests.support import narrow_outputs
from tests.support.batch_case import BatchCase
from tests.support.cover import needed
from tests.support.fp8_case import CUT, LONG, SMALL, VARIED, Fp8Case
from tests.support.persistent_emulated import TARGETS, Target, assert_cut, name, solve_on
from tests.support.right import families
from tests.support.schedules import all_alike, in_turn

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(("case", "schedule"), in_turn(needed((*SMALL, *VARIED), besides=(*LONG, *CUT))), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_fp8(target: Target, case: Fp8Case, schedule: Schedule) -> None:
    assert families(solve_on(target, case, schedule, sms=3)) == [target.kernels]


@pytest.mark.parametrize("case", LONG, ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_many_tiles(target: Target, case: Fp8Case) -> None:
    assert families(solve_on(target, case, Schedule(), sms=1)) == [target.kernels]


@pytest.mark.parametrize(("case", "schedule"), in_turn(CUT), ids=name)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_cut_keys(target: Target, case: Fp8Case, schedule: Schedule) -> None:
    """Partial outputs hold the scale of their head; their merge applies what is left."""
    assert_cut(target, solve_on(target, case, schedule, sms=16))


@pytest.mark.parametrize(("problem", "schedule"), in_turn(narrow_outputs.PROBLEMS, structure=all_alike), ids=name)
def test_narrow_outputs_are_rounded_once(problem: BatchCase, schedule: Schedule) -> None:
    """On the wgmma kernels, and by the merge of their partials."""
    with using("sm_90a", kernels="fa3", schedule=schedule, sms=8):
        narrow_outputs.assert_rounded(problem, "cpu", "emulator")


@pytest.mark.parametrize(("head_dim", "o_dtype"), [(64, torch.float8_e4m3fn), (80, torch.float8_e5m2)])
def test_narrow_outputs_of_fp8_products(head_dim: int, o_dtype: torch.dtype) -> None:
    """q, k and v in fp8, whose accumulators hold even and odd dimensions apart."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((140, 2, head_dim), (200, 1, head_dim), (200, 1, head_dim))
    q, k, v = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for shape in shapes)
    with using("sm_90a", kernels="fa3"):
        wide, out = (
            single_prefill_with_kv_cache(q, k, v, causal=True, o_dtype=dtype, backend="emulator")
            for dtype in (torch.float32, o_dtype)
        )
    assert torch.equal(wide.to(o_dtype).view(torch.uint8), out.view(torch.uint8))
