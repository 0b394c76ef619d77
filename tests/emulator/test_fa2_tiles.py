"""fa2 where its tiles are others than those of the matrix: head dimension 512, whose warps exchange P through shared
memory, on every kind of GPU, and GPUs with 99 KB of shared memory, whose splits are their own, too.
"""

from __future__ import annotations

import pytest
import torch

from cute_attn import single_prefill_with_kv_cache
from cute_attn.emulator import Schedule
from tests.support.batch_case import BatchCase, dims, heads, paged
from tests.support.matrix import BF16, CAUSAL, CUSTOM, E4M3, ROPE, decode, prefill
from tests.support.persistent_emulated import name
from tests.support.right import emulate, emulate_call
from tests.support.schedules import SCHEDULES, all_alike, in_turn, structure

pytestmark = pytest.mark.emulator

WIDE = (
    (prefill(40, 100, (2, 1), 512, **CAUSAL, **BF16), "sm_90a"),  # two query tiles
    (decode(300, (8, 1), 512, **E4M3), "sm_90a"),
    (prefill(40, 50, (1, 1), 512, **CAUSAL), "sm_120a"),
    (decode(100, (4, 1), 512, **BF16), "sm_120a"),
    (prefill(40, 70, (1, 1), 512, **BF16), "sm_80"),
    (prefill(9, 33, (2, 1), 512, **CUSTOM, o_dtype="float32"), "sm_80"),
)
SMALL: tuple[BatchCase, ...] = (
    prefill(130, 150, (2, 1), 128, **BF16, **CAUSAL),  # eight warps of 16 rows
    prefill(50, 200, (1, 1), 64, **CUSTOM, o_dtype="float32"),
    prefill(70, 70, (1, 1), 256, **BF16, **ROPE),
    prefill(33, 65, (2, 1), (192, 128), **CAUSAL, logits_soft_cap=30.0),
    decode(300, (8, 1), 128, **BF16),  # two warps, split keys
    paged((130, 9), (300, 200), page_size=5, **BF16, **dims(128), **heads(2, 1)),
    paged((1, 1, 1), (300, 7, 70), page_size=16, kv_dtype="float8_e4m3fn", **dims(256), **heads(4, 1)),
)
CASES = [
    *((problem, arch, schedule) for (problem, arch), schedule in in_turn(WIDE, SCHEDULES, all_alike)),
    *((problem, "sm_120a", schedule) for problem, schedule in in_turn(SMALL, structure=structure)),
]


@pytest.mark.parametrize(("problem", "arch", "schedule"), CASES, ids=name)
def test_tiles(problem: BatchCase, arch: str, schedule: Schedule) -> None:
    emulate(problem, arch, "fa2", schedule, sms=4)


def test_rows_that_rise_are_rescaled_by_all_warps() -> None:
    """Scores that grow from tile to tile, in columns of one warp: all warps rescale their slices of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 512, generator=generator) for n in (70, 200, 200))
    k[7::32] = q[:7].mean(0) * torch.arange(len(k[7::32]))[:, None, None] * 4
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    emulate_call(single_prefill_with_kv_cache, q, k, v, on=("fa2", "sm_90a"), near=2e-2)
