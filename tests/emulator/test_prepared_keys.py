"""Keys and values that persistent kernels prepare: of 8 bits under 16-bit q; NVFP4 and rotated keys, by the transform
warps of fa3. Their matrices, every number.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_attn import BatchPrefillWithRaggedKVCacheWrapper, single_prefill_with_kv_cache
from cute_attn.emulator import Schedule, using
from cute_attn.reference import attention as reference
from tests.support import batch_case
from tests.support.batch_case import BatchCase
from tests.support.case import LOG2E
from tests.support.cover import needed
from tests.support.matrix import SMALL
from tests.support.persistent_emulated import (
    BATCHES,
    FA3,
    GATHERED,
    LONG,
    NVFP4_BATCHES,
    OF_8_BITS,
    ROPE_BATCHES,
    Target,
    name,
    of_8_bits,
    solve_on,
)
from tests.support.right import launched
from tests.support.schedules import all_alike, in_turn, way_of_keys

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


# --- fa3's transform warps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "schedule"),
    [*in_turn(NVFP4_BATCHES, structure=all_alike), *in_turn(ROPE_BATCHES, structure=all_alike)],
    ids=name,
)
def test_transformed(batch: BatchCase, schedule: Schedule) -> None:
    specs = [record.spec for record in solve_on(FA3, batch, schedule, sms=3).records]
    transforms = {(spec["kv_dtype"], spec["pos_encoding"]) for spec in specs if spec["kernel"] == "fa3"}
    assert transforms == {("nvfp4", "none") if batch in NVFP4_BATCHES else ("", "rope")}


@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_nvfp4_number_is_exact(q_dtype: torch.dtype) -> None:
    """A token has all codes with 16 block scales, the smallest, the largest and negative ones among them. Row i of q is
    unit vector i, whose lse is number i of the key. With a key of zeros, o is the value.
    """
    codes = torch.arange(0, 16, 2, dtype=torch.uint8)
    packed = (codes | (codes + 1) << 4).repeat(16).view(1, 1, 128)
    of_blocks = (0, 1, 2, 7, 8, 9, 0x11, 0x38, 0x3D, 0x3F, 0x7D, 0x7E, 0x81, 0xB8, 0xFE, 0x80)
    scales = torch.tensor(of_blocks, dtype=torch.uint8).view(1, 1, 16).view(torch.float8_e4m3fn)
    numbers = reference.nvfp4_values(packed, scales)[0, 0]
    zeros = torch.zeros_like(scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    q = torch.eye(256).to(q_dtype)[:, None].contiguous()
    ends = torch.tensor([0, 256], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    planned = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), backend="emulator")
    dtypes = {"q_data_type": q_dtype, "kv_data_type": torch.uint8, "o_data_type": torch.float32}
    with using("sm_90a", kernels="fa3"):
        planned.plan(*ends, 1, 1, 256, sm_scale=1.0, **dtypes)
        _, lse = planned.run(q, packed, packed, kv_cache_sf=(scales, scales), return_lse=True)
        out = planned.run(q, packed, packed, kv_cache_sf=(zeros, scales))
    torch.testing.assert_close(lse[:, 0], LOG2E * numbers, rtol=1e-6, atol=0)
    assert torch.equal(out, numbers.expand(256, 1, 256))


def test_rope_at_position_2_to_the_17() -> None:
    """Angles of 130,000 radians, at keys that the window shows."""
    length, near, dim = 1 << 17, 256, 64
    generator = torch.Generator().manual_seed(0)
    q, k_near, v_near = (torch.randn(n, 1, dim, generator=generator).half() for n in (70, near, near))
    k, v = (torch.zeros(length, 1, dim, dtype=torch.float16) for _ in "kv")
    k[-near:], v[-near:] = k_near, v_near
    with using("sm_90a", kernels="fa3"):
        out, lse = single_prefill_with_kv_cache(
            *(q, k, v),
            causal=True,
            window_left=100,
            pos_encoding_mode="ROPE_LLAMA",
            return_lse=True,
            backend="emulator",
        )
    rotated = [reference.rope(x, torch.arange(length - len(x), length)) for x in (q, k_near)]
    expected = reference.attention(*rotated, v_near, mask=reference.Mask(causal=True, window_left=100))
    torch.testing.assert_close(out.double(), expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected[1], rtol=0, atol=4e-3)
