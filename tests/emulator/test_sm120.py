"""Kernels for GPUs with 99 KB of shared memory, whose tiles and splits are their own, on every schedule."""

from __future__ import annotations

import pytest

from cute_attn.emulator import Schedule
from tests.support.batch_case import BatchCase, dims, heads, paged
from tests.support.case import Case
from tests.support.matrix import BF16, CAUSAL, CUSTOM, ROPE, decode, prefill
from tests.support.persistent_emulated import name
from tests.support.right import emulate
from tests.support.schedules import in_turn, structure

pytestmark = pytest.mark.emulator

ARCH = "sm_120a"
SINGLE: tuple[Case, ...] = (
    prefill(130, 150, (2, 1), 128, **BF16, **CAUSAL),  # eight warps of 16 rows
    prefill(50, 200, (1, 1), 64, **CUSTOM, o_dtype="float32"),
    prefill(70, 70, (1, 1), 256, **BF16, **ROPE),
    prefill(33, 65, (2, 1), (192, 128), **CAUSAL, logits_soft_cap=30.0),
    decode(300, (8, 1), 128, **BF16),  # two warps, split keys
)
BATCHES: tuple[BatchCase, ...] = (
    paged((130, 9), (300, 200), page_size=5, **BF16, **dims(128), **heads(2, 1)),
    paged((1, 1, 1), (300, 7, 70), page_size=16, kv_dtype="float8_e4m3fn", **dims(256), **heads(4, 1)),
)


@pytest.mark.parametrize(("problem", "schedule"), in_turn(SINGLE, structure=structure), ids=name)
def test_single(problem: Case, schedule: Schedule) -> None:
    emulate(problem, ARCH, "fa2", schedule, sms=4)


@pytest.mark.parametrize(("problem", "schedule"), in_turn(BATCHES, structure=structure), ids=name)
def test_batch(problem: BatchCase, schedule: Schedule) -> None:
    emulate(problem, ARCH, "fa2", schedule, sms=4)
