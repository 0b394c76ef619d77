"""Shared-memory maps and barrier arrivals of persistent kernels. No GPU, no kernel."""

from __future__ import annotations

import itertools

import pytest

from cute_attn.kernels.blocks.pipeline import WarpRole, empty_arrivals, full_arrivals
from cute_attn.kernels.blocks.smem_map import RingLayout, Scratch, SmemMap
from cute_attn.kernels.fa3.default_specs import default_specs
from cute_attn.kernels.fa3.smem import HopperMemory, Nvfp4KvMemory
from cute_attn.runtime.arch import named


@pytest.mark.parametrize("memory", sorted({HopperMemory.of(spec) for spec in default_specs()}, key=repr), ids=repr)
def test_regions_of_every_kernel(memory: HopperMemory) -> None:
    """No two overlap, swizzled slots start at whole swizzle atoms (packed NVFP4 rows are not swizzled), barriers and
    records are aligned.
    """
    smem_map = memory.map
    regions = list(smem_map.regions.values())
    for before, after in itertools.pairwise(regions):
        assert before.offset + before.bytes <= after.offset
    for ring in smem_map.rings:
        packed = isinstance(memory, Nvfp4KvMemory) and ring.name.startswith("staged")
        slot_alignment = 128 if packed else 1024
        assert smem_map.offset(ring.name) % slot_alignment == 0
        assert ring.slot_bytes % slot_alignment == 0
        assert smem_map.barriers(ring.name) % 8 == 0
    assert smem_map.offset("records") % 64 == 0
    assert memory.bytes <= named("sm_90a").smem_limit


def test_scratch_lies_between_slots_and_barriers() -> None:
    smem_map = SmemMap((RingLayout("q", 1, 100), RingLayout("kv", 3, 200)), (Scratch("sums", 20),))
    assert [smem_map.offset(name) for name in ("q", "kv", "sums")] == [0, 100, 700]
    assert (smem_map.barriers("q"), smem_map.barriers("kv")) == (720, 736)
    assert smem_map.regions["records"] == (832, 128)  # 736 + 48 = 784, up to the next multiple of 64
    assert smem_map.bytes == 960


def test_arrivals_follow_from_roles() -> None:
    roles = [
        WarpRole("producer", 1, fills={"q": 1, "k": 1, "staged_v": 1}),
        WarpRole("transform", 3, fills={"v": 3}, reads=("staged_v",), reads_records=True),
        WarpRole("MMA", 8, fills={}, reads=("q", "k", "v"), reads_records=True),
    ]
    arrivals = {ring: (full_arrivals(roles, ring), empty_arrivals(roles, ring)) for ring in ("q", "k", "v", "staged_v")}
    assert arrivals == {"q": (1, 11), "k": (1, 8), "v": (3, 8), "staged_v": (1, 3)}
