"""Tiles of persistent kernels, fa3 and fa4: their tables, their shared memory, pairs of CTAs. No GPU, no kernel."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest

from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, PAGE_ALIGNED, Launch, Operands, TileProblem
from cute_attn.kernels.fa3 import tiles as fa3_tiles
from cute_attn.kernels.fa3.default_specs import default_specs as fa3_specs
from cute_attn.kernels.fa3.smem import Fp8KvMemory, HopperMemory, Nvfp4KvMemory
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.fa4 import tiles as fa4_tiles
from cute_attn.kernels.fa4.default_specs import default_specs as fa4_specs
from cute_attn.kernels.fa4.smem import BlackwellMemory
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.kernels.host.persistent.family import launch_of
from cute_attn.runtime.arch import named
from tests.support.persistent_host import TARGETS

FA3, FA4 = TARGETS
KINDS: dict[tuple[str, str], Operands] = {  # dtype and kv_dtype of a spec, and the operands
    ("bfloat16", ""): "",
    ("float8_e4m3fn", ""): "fp8",
    ("bfloat16", "float8_e4m3fn"): "fp8_kv",
}
SPECS = {"sm_90a": fa3_specs(), **{arch: fa4_specs(named(arch)) for arch in fa4_tiles.ARCHS}}  # of the compile gate
WINDOWS = ((-1, 1), (127, 8), (127, 1), (511, 8), (1023, 8))  # `window_left` and heads per kv head


def fa3_tile(problem: TileProblem) -> HopperTile:
    return fa3_tiles.rule_of(problem).value


def fa4_tile(problem: TileProblem, arch: str = "sm_100a") -> BlackwellTile:
    return fa4_tiles.rule_of(arch, problem).value


def tiles_of(arch: str, operands: Operands) -> list[tuple[tuple[int, int], Any]]:
    """Returns the head dims and tiles of all kinds of problems."""
    tiles, family = (fa3_tiles, FA3.family) if arch == "sm_90a" else (fa4_tiles, FA4.family)
    known = itertools.product(("dense", "paged", "gathered"), (False, True), (False, True), WINDOWS, get_args(Launch))
    return [
        (dims, family.rule_for(arch, TileProblem(dims, kv, operands, plain, full, *window, launch)).value)
        for kv, plain, full, window, launch in known
        for dims in (FP8_HEAD_DIMS if operands == "fp8" else tiles.HEAD_DIMS)
    ]


@pytest.mark.parametrize("arch", SPECS)
def test_every_tile_is_a_default_kernel(arch: str) -> None:
    compiled = {((s.head_dim_qk, s.head_dim_vo), s.tile) for s in SPECS[arch] if isinstance(s, Fa3Spec | Fa4Spec)}
    for operands in KINDS.values() if arch != "sm_90a" else ("", "fp8_kv"):
        assert {*tiles_of(arch, operands)} <= compiled


@pytest.mark.parametrize(
    ("tiles", "head_dims"), [(tiles, head_dims) for tiles in (fa3_tiles, fa4_tiles) for head_dims in tiles.HEAD_DIMS]
)
def test_where_pages_come_from(tiles: Any, head_dims: tuple[int, int]) -> None:
    """Boxes from a size on that page and tile have in common; in fa3 gathering leaves registers for two groups."""
    sources = {size: tiles.page_source(head_dims, size) for size in (1, 3, 5, 8, 63, 100, 64, 128, 192)}
    assert [sources[size] for size in (64, 128, 192)] == ["paged"] * 3
    assert [sources[size] for size in (1, 3, 5, 8, 63, 100)] == ["gathered"] * 6
    sources = {size: tiles.page_source((128, 128), size, "fp8_kv") for size in (1, 4, 8, 64)}
    assert list(sources.values()) == ["gathered", "gathered", "paged", "paged"]
    choose = fa3_tile if tiles is fa3_tiles else fa4_tile
    assert choose(TileProblem(head_dims, "paged")).cols % PAGE_ALIGNED == 0
    if tiles is fa3_tiles:
        tile = choose(TileProblem(head_dims, "gathered"))
        spec = Fa3Spec("float16", "float16", *head_dims, kv="gathered", tile=tile)
        assert tile.mma_warpgroups == 2
        assert spec.registers[0] > Fa3Spec("float16", "float16", *head_dims, tile=tile).registers[0]


# ---- fa3


def test_tiles_of_windows() -> None:
    """CTAs that share an SM fit it; a long window at head dim 128 has the tile of other masks."""
    for head_dims in ((64, 64), (128, 128)):
        window = TileProblem(head_dims, "paged", plain=False, window_left=127)
        narrow = fa3_tile(window)
        bytes_ = HopperMemory.of(Fa3Spec("float16", "float16", *head_dims, kv="paged", tile=narrow)).bytes
        assert narrow.per_sm * (bytes_ + 1024) <= 228 << 10
        assert fa3_tile(window._replace(kv="gathered")).mma_warpgroups == 2
    for window_left, group, rows in ((191, 8, 64), (192, 8, 192), (1024, 4, 192), (1025, 8, 64), (191, 2, 64)):
        tile = fa3_tile(TileProblem((64, 64), plain=False, window_left=window_left, group=group))
        assert (tile.rows, tile.from_first_key) == (rows, group >= 4 and window_left <= 1024)
    odd = fa3_tile(TileProblem((64, 64), plain=False, window_left=500, group=5))  # heads that fill no tile
    assert odd.per_sm == 3
    modified = TileProblem((128, 128), "paged", plain=False)
    assert fa3_tile(modified) == fa3_tile(modified._replace(window_left=1023)) != narrow


def test_tiles_follow_the_size_of_the_launch() -> None:
    """For rows whose scores are not modified; gathered pages, pages and masks keep theirs."""
    launches = {
        (4000, 1000): "few",
        (32_000, 1000): "few",
        (34_000, 1000): "short",
        (34_000, 225): "short",
        (34_000, 224): "shortest",
        (32_000, 224): "few",
        (32_000, 1025): "",
        (4096 * 32, 4096): "long",
        (16384 * 8, 16384): "long",
        (4095 * 32, 4095): "",
    }
    for (rows, tokens), launch in launches.items():
        assert launch_of(rows, 132, tokens, tokens) == launch
    assert set(launches.values()) == set(get_args(Launch))
    for rule in fa3_tiles.SIZED:
        (head_dims,), (launch, *_), full = (rule.when[name] for name in ("head_dims", "launch", "full"))
        usual = TileProblem(head_dims)
        sized = usual._replace(launch=launch)
        assert fa3_tile(sized) == rule.value != fa3_tile(usual)
        assert (fa3_tile(sized._replace(full=True)) == fa3_tile(usual)) == (True not in full)
        for change in ({"kv": "paged"}, {"kv": "gathered"}, {"plain": False}):
            assert fa3_tile(sized._replace(**change)) == fa3_tile(usual._replace(**change))


def test_tiles_that_wait_to_be_widened_fit_shared_memory() -> None:
    for head_dims, tile in tiles_of("sm_90a", "fp8_kv"):
        memory = HopperMemory.of(Fa3Spec("float16", "float16", *head_dims, kv_dtype="float8_e5m2", tile=tile))
        assert isinstance(memory, Fp8KvMemory)
        assert tile.staged > 0
        assert memory.bytes <= 227 * 1024


@pytest.mark.parametrize("memory", sorted({HopperMemory.of(spec) for spec in fa3_specs()}, key=repr), ids=repr)
def test_regions_of_every_kernel(memory: HopperMemory) -> None:
    """No two overlap, swizzled slots start at whole swizzle atoms (packed NVFP4 rows are not swizzled), barriers and
    records are aligned.
    """
    regions = list(memory.regions.values())
    for before, after in itertools.pairwise(regions):
        assert before.offset + before.bytes <= after.offset
    for ring in memory.rings:
        packed = isinstance(memory, Nvfp4KvMemory) and ring.name.startswith("staged")
        slot_alignment = 128 if packed else 1024
        assert memory.offset(ring.name) % slot_alignment == 0
        assert ring.slot_bytes % slot_alignment == 0
        assert memory.barriers(ring.name) % 8 == 0
    assert memory.offset("records") % 64 == 0
    assert memory.bytes <= named("sm_90a").smem_limit


# ---- fa4


@pytest.mark.parametrize("arch", fa4_tiles.ARCHS)
@pytest.mark.parametrize("dtypes", KINDS)
def test_tiles_fit_shared_memory(arch: str, dtypes: tuple[str, str]) -> None:
    dtype, kv_dtype = dtypes
    for head_dims, tile in tiles_of(arch, KINDS[dtypes]):
        memory = BlackwellMemory.of(Fa4Spec(dtype, "bfloat16", *head_dims, kv_dtype=kv_dtype, tile=tile))
        assert memory.bytes <= named(arch).smem_limit, (head_dims, tile)


@pytest.mark.parametrize("head_dims", fa4_tiles.HEAD_DIMS)
def test_the_fma_units_help_the_slower_mufu_only(head_dims: tuple[int, int]) -> None:
    slow, fast = (fa4_tile(TileProblem(head_dims), arch) for arch in fa4_tiles.ARCHS)
    assert fast == dataclasses.replace(slow, polynomial=0)
    assert (slow.polynomial > 0) == (sum(head_dims) < 512)  # from there on tensor cores need twice as long as the MUFU


@pytest.mark.parametrize("head_dims", [(112, 112), (128, 128), (192, 128)])
def test_pairs_where_all_rows_see_all_keys(head_dims: tuple[int, int]) -> None:
    ctas = {full: fa4_tile(TileProblem(head_dims, full=full)).ctas for full in (False, True)}
    assert ctas == {False: 1, True: 2}
    assert fa4_tile(TileProblem(head_dims, "gathered", full=True)).ctas == 1
    assert fa4_tile(TileProblem((128, 128), operands="fp8", full=True)).ctas == 1


@pytest.mark.parametrize(("dim", "runs_as"), [(32, 64), (72, 96), (112, 128), (192, 256)])
def test_other_head_dims_run_in_the_next_larger_tile(dim: int, runs_as: int) -> None:
    own, larger = (fa4_tile(TileProblem((n, n))) for n in (dim, runs_as))
    assert own == larger


# ---- pairs of CTAs of fa4: what each loads, and how many are launched

ALONE, PAIR = (BlackwellTile(query_tiles=1, cols=128, ctas=ctas) for ctas in (1, 2))


def test_a_cta_of_a_pair_holds_its_own_queries_and_half_of_k_and_v() -> None:
    alone, pair = (BlackwellMemory(tile, 256, 256) for tile in (ALONE, PAIR))
    assert pair.ring("q").slot_bytes == alone.ring("q").slot_bytes
    for operand in "kv":
        assert 2 * pair.ring(operand).slot_bytes == alone.ring(operand).slot_bytes


@pytest.mark.parametrize(("head_dim", "columns"), [(128, 1), (160, 2), (192, 2), (256, 2)])
def test_the_ctas_of_a_pair_have_equal_columns_of_v(head_dim: int, columns: int) -> None:
    assert BlackwellMemory(PAIR, 256, head_dim).loaded("v").columns == columns
