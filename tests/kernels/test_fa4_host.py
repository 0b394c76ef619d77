"""Tile tables of fa4. No GPU, no kernel."""

from __future__ import annotations

import dataclasses

import pytest

from cute_attn.kernels.blocks.tiles import PAGE_ALIGNED, Operands, TileProblem
from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.default_specs import default_specs
from cute_attn.kernels.fa4.smem import BlackwellMemory
from cute_attn.kernels.fa4.spec import BlackwellTile, Fa4Spec
from cute_attn.runtime.arch import named

KINDS: dict[tuple[str, str], Operands] = {  # dtype and kv_dtype of a spec, and the operands of `candidates`
    ("bfloat16", ""): "",
    ("float8_e4m3fn", ""): "fp8",
    ("bfloat16", "float8_e4m3fn"): "fp8_kv",
}


@pytest.mark.parametrize("arch", tiles.ARCHS)
def test_every_tile_is_a_default_kernel(arch: str) -> None:
    compiled = {(s.head_dim_qk, s.head_dim_vo, s.tile) for s in default_specs(named(arch)) if isinstance(s, Fa4Spec)}
    for candidates in (tiles.candidates(arch, kind) for kind in KINDS.values()):
        for (dim_qk, dim_vo), of_dims in candidates.items():
            assert {(dim_qk, dim_vo, tile) for tile in of_dims} <= compiled


@pytest.mark.parametrize("arch", tiles.ARCHS)
@pytest.mark.parametrize("dtypes", KINDS)
def test_tiles_fit_shared_memory(arch: str, dtypes: tuple[str, str]) -> None:
    dtype, kv_dtype = dtypes
    for dims, of_dims in tiles.candidates(arch, KINDS[dtypes]).items():
        for tile in of_dims:
            memory = BlackwellMemory.of(Fa4Spec(dtype, "bfloat16", *dims, kv_dtype=kv_dtype, tile=tile))
            assert memory.bytes <= named(arch).smem_limit, (dims, tile)


@pytest.mark.parametrize("dims", tiles.HEAD_DIMS)
def test_the_fma_units_help_the_slower_mufu_only(dims: tuple[int, int]) -> None:
    slow, fast = (tiles.choose(arch, TileProblem(dims)) for arch in tiles.ARCHS)
    assert fast == dataclasses.replace(slow, polynomial=0)
    assert (slow.polynomial > 0) == (sum(dims) < 512)  # from there on tensor cores need twice as long as the MUFU


@pytest.mark.parametrize("dims", tiles.HEAD_DIMS)
def test_where_pages_come_from(dims: tuple[int, int]) -> None:
    """Boxes from a size on that page and tile have in common."""
    sources = {size: tiles.page_source(dims, size) for size in (1, 3, 5, 8, 63, 100, 64, 128, 192)}
    assert [sources[size] for size in (64, 128, 192)] == ["paged"] * 3
    assert [sources[size] for size in (1, 3, 5, 8, 63, 100)] == ["gathered"] * 6
    assert [tiles.page_source((128, 128), size, "fp8_kv") for size in (1, 4, 8, 64)] == ["gathered"] * 2 + ["paged"] * 2
    assert tiles.choose("sm_100a", TileProblem(dims, "paged")).cols % PAGE_ALIGNED == 0


@pytest.mark.parametrize("dims", [(112, 112), (128, 128), (192, 128)])
def test_pairs_where_all_rows_see_all_keys(dims: tuple[int, int]) -> None:
    ctas = {full: tiles.choose("sm_100a", TileProblem(dims, full=full)).ctas for full in (False, True)}
    assert ctas == {False: 1, True: 2}
    assert tiles.choose("sm_100a", TileProblem(dims, "gathered", full=True)).ctas == 1
    assert tiles.choose("sm_100a", TileProblem((128, 128), operands="fp8", full=True)).ctas == 1


@pytest.mark.parametrize(("dims", "runs_as"), [((32, 32), 64), ((72, 72), 96), ((112, 112), 128), ((192, 192), 256)])
def test_other_head_dims_run_in_the_next_larger_tile(dims: tuple[int, int], runs_as: int) -> None:
    assert tiles.choose("sm_100a", TileProblem(dims)) == tiles.choose("sm_100a", TileProblem((runs_as, runs_as)))


@pytest.mark.parametrize(("change", "rule"), [({"cols": 96}, "cols must"), ({"query_tiles": 3}, "query_tiles must")])
def test_tiles_that_no_kernel_has(change: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(BlackwellTile(), **change)
