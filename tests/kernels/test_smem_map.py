"""Shared-memory maps of persistent kernels. No GPU, no kernel."""

from __future__ import annotations

import itertools

import pytest

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
