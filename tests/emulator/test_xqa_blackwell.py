"""The decode kernel for Blackwell on the emulator: every format of K and V, with all that decides which keys a row
sees, under all schedules."""

from __future__ import annotations

import re
from itertools import cycle

import pytest

from cute_attn.emulator import Schedule
from cute_attn.kernels.programs import program
from cute_attn.kernels.xqa.tiles import Shape, choose, find
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import named
from tests.emulator.test_xqa import solve
from tests.support.batch_case import E5M2, BatchCase, decode, dims, heads
from tests.support.persistent_emulated import name
from tests.support.right import emulate
from tests.support.schedules import KINDS, in_turn
from tests.support.xqa_case import XqaCase

pytestmark = pytest.mark.emulator

ARCHS = ("sm_100a", "sm_120a")
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65)  # of tiles of all sizes
# Kernels for few pairs of a request and a kv head where the seed is even, for many where it is odd.
CASES = {
    "bf16, edges": XqaCase(EDGES, heads=(4, 1), head_dim=64, sinks=True, seed=1),
    "bf16, a window, drafts": XqaCase((150, 30, 2), heads=(4, 2), q_len=2, window_left=20, page_size=5),
    "fp16, a tree, ragged q": XqaCase(
        (40, 16, 0, 33), q="fp16", kv="fp16", heads=(2, 2), q_len=16, q_lens=(16, 1, 2, 3), mask=True, seed=1
    ),
    "e4m3, edges": XqaCase(EDGES, kv="e4m3", heads=(4, 1), head_dim=64),
    "e4m3, a tree, fp8 output": XqaCase(
        (70, 33), kv="e4m3", heads=(8, 2), q_len=3, mask=True, out="e4m3", o_scale=0.5, kv_layout="HND", seed=1
    ),
    "e5m2, a window, sinks, ragged q": XqaCase(
        (200, 7, 64), kv="e5m2", q="fp16", heads=(6, 2), head_dim=80, q_len=4, q_lens=(1, 4, 2),
        window_left=37, sinks=True,
    ),
    "NVFP4, edges": XqaCase(EDGES, kv="nvfp4", heads=(8, 1), bmm1_scale=0.001, sinks=True, seed=1),
    "NVFP4, few": XqaCase((64, 150, 1), kv="nvfp4", q="fp16", heads=(8, 1), bmm1_scale=0.002, kv_layout="HND"),
    "NVFP4, paired, a window, sinks": XqaCase(
        (300, 7, 64, 65), kv="nvfp4", heads=(4, 1), bmm1_scale=0.001, window_left=70, sinks=True, page_size=5, seed=1
    ),
    "NVFP4, paired, few": XqaCase(EDGES, kv="nvfp4", heads=(2, 1), head_dim=64, bmm1_scale=0.002),
    "NVFP4, a tree, ragged q": XqaCase(
        (90, 16, 3), kv="nvfp4", heads=(6, 1), head_dim=64, q_len=3, q_lens=(3, 1, 2), mask=True,
        bmm1_scale=0.002, seed=1,
    ),
    "NVFP4, blocks, a tree, a window": XqaCase(
        (150, 64, 7), kv="nvfp4", heads=(6, 1), q_len=3, q_lens=(3, 1, 2), mask=True, window_left=90,
        bmm1_scale=0.001, page_size=5, sinks=True, seed=1,
    ),
    "NVFP4, two warps": XqaCase((70, 33), kv="nvfp4", heads=(4, 1), head_dim=512, bmm1_scale=0.001),
    "NVFP4, wide, device scales": XqaCase(
        (70, 33), kv="nvfp4", heads=(4, 1), head_dim=256, q_len=2, bmm1_scale=0.001, bmm2_scale=0.5, device_scales=True
    ),
}  # fmt: skip


# Of one spec both architectures have the same PTX; their rings differ. So they take two cases each in turn.
DEALT = list(zip(CASES, cycle(sorted(ARCHS * 2)), strict=False))


@pytest.mark.parametrize(("dealt", "schedule"), in_turn(DEALT, KINDS, lambda dealt: CASES[dealt[0]].kv), ids=name)
def test_case(dealt: tuple[str, str], schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arch = dealt
    assert solve(CASES[case], arch, 3, schedule, monkeypatch) == ""


BATCHES = (
    decode((65, 12, 0), kv_dtype=E5M2, kv_layout="HND", dtype="bfloat16", **heads(4, 2), **dims(128)),
    decode((33, 40), kv_dtype="nvfp4", cache="one", page_size=3, q_len=3, **heads(4, 2)),
    decode((90, 31, 32), page_size=5, cache="strided", window_left=20, sinks=True, **heads(6, 2)),
)


@pytest.mark.parametrize(("batch", "arch", "schedule"), list(zip(BATCHES, cycle(ARCHS), KINDS, strict=False)), ids=name)
def test_wrappers(batch: BatchCase, arch: str, schedule: str) -> None:
    emulation = emulate(batch, arch, "xqa", Schedule(schedule, 1), sms=2)
    assert {record.spec["kernel"] for record in emulation.records} == {"xqa"}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float16", "nvfp4"), *(("bfloat16", x) for x in ("nvfp4", "float8_e4m3fn", E5M2))]
)
def test_fa2_converts(dtype: str, kv_dtype: str) -> None:
    """By other instructions than on Hopper, which has the same code for fp8 to fp16."""
    batch = decode((33, 1), kv_dtype=kv_dtype, dtype=dtype, **heads(2, 1))
    emulation = emulate(batch, "sm_100a", "fa2", sms=1)
    assert "fa2" in {record.spec["kernel"] for record in emulation.records}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_nvfp4_is_converted_by_instructions_where_there_are_any(arch: str) -> None:
    """One for each pair of elements that a lane has of K and V."""
    spec = choose("bfloat16", "nvfp4", "bfloat16", 64, 8, False, find(named(arch), 4, 64, Shape(2)), named(arch))
    ptx = artifacts.get(spec, arch, program).ptx
    per_tile = 2 * spec.cols * spec.head_dim // 2 // 32
    assert len(re.findall(r"cvt\.rn\.f16x2\.e2m1x2", ptx)) == (0 if arch == "sm_90a" else per_tile)
