"""NVFP4 keys and values and RoPE on fa3, whose transform warps widen and rotate tiles."""

from __future__ import annotations

import pytest
import torch

from cute_attn import BatchPrefillWithRaggedKVCacheWrapper, single_prefill_with_kv_cache
from cute_attn.emulator import Schedule, using
from cute_attn.reference import attention as reference
from tests.support.batch_case import BatchCase
from tests.support.case import LOG2E
from tests.support.persistent_emulated import FA3, NVFP4_BATCHES, ROPE_BATCHES, name, solve_on
from tests.support.schedules import all_alike, in_turn

pytestmark = pytest.mark.emulator


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
def test_every_number_is_exact(q_dtype: torch.dtype) -> None:
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
