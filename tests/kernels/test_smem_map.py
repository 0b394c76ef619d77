"""Shared-memory maps and barrier arrivals of persistent kernels. No GPU, no kernel."""

from __future__ import annotations

import itertools

import pytest

from cute_attn.kernels.blocks.pipeline import WarpRole, empty_arrivals, full_arrivals
from cute_attn.kernels.blocks.smem_map import RingLayout, Scratch, SmemMap
from cute_attn.kernels.fa3.default_specs import default_specs
from cute_attn.kernels.fa3.smem import HopperMemory, Nvfp4KvMemory
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.runtime.arch import named

KB = 1024
FP8 = "float8_e4m3fn"
HALF = "float16"
WIDENED = HopperTile(128, 128, 2, 1, staged=2, transform_warps=7)

# A tile of each kind: bytes of each region in order, from rows and columns of 128-byte lines; then the total.
MAPS = [
    (
        Fa3Spec(HALF, HALF, 128, 128, tile=HopperTile(128, 128, 2, 2)),
        {"q": 64 * KB, "k": 64 * KB, "v": 64 * KB, "q barriers": 32, "k barriers": 32, "v barriers": 32},
        192 * KB + 128 + 256,
    ),
    (
        Fa3Spec(HALF, HALF, 192, 128, tile=HopperTile(128, 128, 2, 1)),
        {"q": 48 * KB, "k": 96 * KB, "v": 64 * KB, "q barriers": 16, "k barriers": 32, "v barriers": 32},
        208 * KB + 128 + 128,
    ),
    (
        Fa3Spec(FP8, HALF, 128, 128, tile=HopperTile(192, 96, 2, 2)),
        {"q": 48 * KB, "k": 24 * KB, "v": 32 * KB, "staged_v": 24 * KB, "sums": 48 * KB}
        | {f"{ring} barriers": 32 for ring in ("q", "k", "v", "staged_v")},
        176 * KB + 128 + 256,
    ),
    (
        Fa3Spec(HALF, HALF, 128, 128, kv_dtype=FP8, tile=WIDENED),
        {"q": 32 * KB, "k": 64 * KB, "v": 64 * KB, "staged_k": 32 * KB, "staged_v": 32 * KB, "q barriers": 16}
        | {f"{ring} barriers": 32 for ring in ("k", "v", "staged_k", "staged_v")},
        224 * KB + 192 + 128,
    ),
]


@pytest.mark.parametrize(("spec", "sizes", "total"), MAPS)
def test_sizes_of_regions(spec: Fa3Spec, sizes: dict[str, int], total: int) -> None:
    memory = HopperMemory.of(spec)
    ends = list(itertools.accumulate(sizes.values()))
    expected = dict(zip(sizes, [0, *ends[:-1]], strict=True))
    regions = memory.map.regions
    assert {name: region.offset for name, region in regions.items() if name != "records"} == expected
    assert {name: region.bytes for name, region in regions.items() if name != "records"} == sizes
    assert memory.bytes == total


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


ARRIVALS = [  # per ring: arrivals at a full and at an empty barrier
    (Fa3Spec(HALF, HALF, 128, 128), {"q": (1, 8), "k": (1, 8), "v": (1, 8)}),
    (Fa3Spec(HALF, HALF, 128, 128, kv="gathered", schedule="items"), {"q": (1, 8), "k": (4, 8), "v": (4, 8)}),
    (
        Fa3Spec(FP8, HALF, 128, 128, tile=HopperTile(192, 96, 2, 2)),
        {"q": (1, 15), "k": (1, 12), "v": (3, 12), "staged_v": (1, 3)},
    ),
    (
        Fa3Spec(HALF, HALF, 128, 128, kv="gathered", schedule="items", kv_dtype=FP8, tile=WIDENED),
        {"q": (1, 15), "k": (7, 8), "v": (7, 8), "staged_k": (32, 7), "staged_v": (32, 7)},
    ),
]


@pytest.mark.parametrize(("spec", "expected"), ARRIVALS, ids=["16-bit", "gathered", "fp8", "gathered fp8 kv"])
def test_arrivals_of_the_hopper_kernels(spec: Fa3Spec, expected: dict[str, tuple[int, int]]) -> None:
    pytest.importorskip("cutlass.cute", reason="needs the DSL", exc_type=ImportError)
    from cute_attn.kernels.fa3.kernel import Fa3Program
    from cute_attn.kernels.programs import program

    made = program(spec, "sm_90a")
    assert isinstance(made, Fa3Program)
    roles, rings = made.roles, HopperMemory.of(spec).map.rings
    assert {
        ring.name: (full_arrivals(roles, ring.name), empty_arrivals(roles, ring.name)) for ring in rings
    } == expected
    assert sum(role.warps for role in roles) <= spec.tile.threads // 32
