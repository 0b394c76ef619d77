"""q of 16 bits over fp8 keys and values on persistent kernels: their matrix, every fp8 number."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_attn import BatchPrefillWithRaggedKVCacheWrapper, single_prefill_with_kv_cache
from cute_attn.emulator import Schedule, using
from tests.support import batch_case
from tests.support.batch_case import BatchCase
from tests.support.case import LOG2E
from tests.support.cover import needed
from tests.support.matrix import SMALL
from tests.support.persistent_emulated import BATCHES, GATHERED, LONG, OF_8_BITS, Target, name, of_8_bits, solve_on
from tests.support.right import launched
from tests.support.schedules import in_turn, way_of_keys

pytestmark = pytest.mark.emulator

LONG_PROBLEMS = needed(of_8_bits((*LONG, *BATCHES, *GATHERED)))
SMALL_PROBLEMS = needed(of_8_bits((*SMALL, *batch_case.SMALL)), besides=LONG_PROBLEMS)
# On each target in turn: what they differ in 16-bit keys have on all targets.
DEALT = list(zip(itertools.cycle(OF_8_BITS), in_turn(SMALL_PROBLEMS), strict=False))


@pytest.fixture(params=OF_8_BITS, ids=name)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.mark.parametrize(("target", "turn"), DEALT, ids=name)
def test_small(target: Target, turn: tuple[BatchCase, Schedule]) -> None:
    solve_on(target, *turn)


@pytest.mark.parametrize(("problem", "schedule"), in_turn(LONG_PROBLEMS, structure=way_of_keys), ids=name)
def test_long(target: Target, problem: BatchCase, schedule: Schedule) -> None:
    """On every target, which has tiles and staging of its own for 8-bit keys: dense ones, boxes of pages, and small
    pages gathered by one warp. The first of each way on all schedules.
    """
    emulation = solve_on(target, problem, schedule, sms=3)
    assert {record.spec["kv_dtype"] for record in launched(emulation)} == {problem.kv_dtype}


def codes(stored: torch.dtype) -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).view(stored)


def one_key_each(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of token i for key i alone: a window of one key, in requests of 64 tokens; the last one has one."""
    ends = torch.tensor([*range(0, len(k) - 1, 64), len(k) - 1, len(k)], dtype=torch.int32)
    planned = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
    types = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    planned.plan(ends, ends, 1, 1, 256, causal=True, window_left=0, sm_scale=1.0, **types)
    return planned.run(q, k, v, return_lse=True)


@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number_is_exact(target: Target, stored: torch.dtype, q_dtype: torch.dtype) -> None:
    """One token that sees one key per code: the lse is that number of K; o is a row of V, with all of its numbers. The
    last one has a probability of 1, and sees NaN and infinities too.
    """
    finite = codes(stored)[codes(stored).float().isfinite()].float()
    finite = torch.cat((finite, torch.zeros(1)))
    # Each key has four places of its own: in fa4 scores above that of the key which a row sees would cost its lse bits.
    own = torch.eye(64).repeat(-(-len(finite) // 64), 4)[: len(finite), None]
    q, k = own * finite.sign()[:, None, None], own * finite[:, None, None]
    v = codes(stored).float().repeat(len(k), 1, 1)
    v[:-1] = v[:-1].nan_to_num(0, 0, 0)
    with using(target.arch, kernels=target.kernels):
        out, lse = one_key_each(q.to(q_dtype), k.to(stored), v.to(stored))
    torch.testing.assert_close(out[-1], v[-1].to(q_dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, v.to(q_dtype), rtol=2**-8, atol=0, equal_nan=True)
    torch.testing.assert_close(lse[:, 0], 4 * LOG2E * finite.abs(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("head_dim", "cap"), [(64, 0.0), (128, 3.0), (128, 0.0), (256, 3.0)])
def test_rows_of_any_size(target: Target, head_dim: int, cap: float) -> None:
    """q of bf16 becomes fp16: rows of zeros, of numbers below fp16's and above them, and rows that have both."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, head_dim, generator=generator) for n in (140, 200, 200))
    q *= 2.0 ** torch.linspace(-130, 4, 140).round()[:, None, None]
    q[:, :, ::5] *= 2.0**-17
    q[-8:] *= 2.0**18
    q[7], k[:] = 0.0, k * 2.0**-16
    q, k, v = q.bfloat16(), k.to(torch.float8_e5m2), v.to(torch.float8_e5m2)
    options = {"causal": True, "logits_soft_cap": cap, "sm_scale": 1.0, "return_lse": True}
    with using(target.arch, kernels=target.kernels):
        out, lse = single_prefill_with_kv_cache(q, k, v, backend="emulator", **options)
    expected = single_prefill_with_kv_cache(q, k, v, backend="reference", **options)
    torch.testing.assert_close(out, expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=2e-3 if cap else 1e-5)
