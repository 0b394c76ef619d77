"""Tile tables of fa3. No GPU, no kernel."""

from __future__ import annotations

import dataclasses

import pytest

from cute_attn.kernels.blocks.tiles import Launch, TileProblem
from cute_attn.kernels.fa3 import tiles as fa3_tiles
from cute_attn.kernels.fa3.default_specs import default_specs
from cute_attn.kernels.fa3.smem import Fp8KvMemory, HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.host.persistent.variant import LAUNCHES, launch_of


def test_every_tile_is_a_default_kernel() -> None:
    compiled = {(s.head_dim_qk, s.head_dim_vo, s.tile) for s in default_specs() if isinstance(s, Fa3Spec)}
    for candidates in (fa3_tiles.candidates(), fa3_tiles.candidates("fp8_kv")):
        for (dim_qk, dim_vo), tiles in candidates.items():
            assert {(dim_qk, dim_vo, tile) for tile in tiles} <= compiled


@pytest.mark.parametrize("dims", fa3_tiles.HEAD_DIMS)
def test_where_pages_come_from(dims: tuple[int, int]) -> None:
    """Boxes from a size on that page and tile have in common; gathering leaves registers for two math groups."""
    sources = {size: fa3_tiles.page_source(dims, size) for size in (1, 3, 5, 8, 63, 100, 64, 128, 192)}
    assert [sources[size] for size in (64, 128, 192)] == ["paged"] * 3
    assert [sources[size] for size in (1, 3, 5, 8, 63, 100)] == ["gathered"] * 6
    assert [fa3_tiles.page_source((128, 128), size, "fp8_kv") for size in (1, 4, 8, 64)] == ["gathered"] * 2 + [
        "paged"
    ] * 2
    tile = fa3_tiles.choose(TileProblem(dims, "gathered"))
    spec = Fa3Spec("float16", "float16", *dims, kv="gathered", tile=tile)
    assert tile.mma_warpgroups == 2
    assert spec.registers[0] > Fa3Spec("float16", "float16", *dims, tile=tile).registers[0]


def test_tiles_of_paged_keys_take_whole_pages() -> None:
    for head_dims in fa3_tiles.HEAD_DIMS:
        assert fa3_tiles.choose(TileProblem(head_dims, "paged")).cols % fa3_tiles.PAGE_ALIGNED == 0
    with pytest.raises(ValueError, match="rows must be 64, 128 or 192"):
        dataclasses.replace(fa3_tiles.choose(TileProblem((64, 64))), rows=256)


def test_tiles_of_windows() -> None:
    """CTAs that share an SM fit it; a long window at head dim 128 has the tile of other masks."""
    for dims in ((64, 64), (128, 128)):
        window = TileProblem(dims, "paged", plain=False, window_left=127)
        narrow = fa3_tiles.choose(window)
        bytes_ = HopperMemory.of(Fa3Spec("float16", "float16", *dims, kv="paged", tile=narrow)).bytes
        assert narrow.per_sm * (bytes_ + 1024) <= 228 << 10
        assert fa3_tiles.choose(window._replace(kv="gathered")).mma_warpgroups == 2
    for window_left, group, rows in ((191, 8, 64), (192, 8, 192), (1024, 4, 192), (1025, 8, 64), (191, 2, 64)):
        tile = fa3_tiles.choose(TileProblem((64, 64), plain=False, window_left=window_left, group=group))
        assert (tile.rows, tile.from_first_key) == (rows, group >= 4 and window_left <= 1024)
    odd = fa3_tiles.choose(TileProblem((64, 64), plain=False, window_left=500, group=5))  # heads that fill no tile
    assert odd.per_sm == 3
    modified = TileProblem((128, 128), "paged", plain=False)
    assert fa3_tiles.choose(modified) == fa3_tiles.choose(modified._replace(window_left=1023)) != narrow


def test_tiles_follow_the_size_of_the_launch() -> None:
    """For rows whose scores are not modified; gathered pages, pages and masks keep theirs."""
    launches = {
        (4000, 1000): Launch(kv_len=1024, few=True),
        (32_000, 1000): Launch(kv_len=1024, few=True),
        (34_000, 1000): Launch(kv_len=1024),
        (34_000, 225): Launch(kv_len=1024),
        (34_000, 224): Launch(kv_len=224),
        (32_000, 224): Launch(kv_len=1024, few=True),
        (32_000, 1025): Launch(),
        (4096 * 32, 4096): Launch(4096),
        (16384 * 8, 16384): Launch(4096),
        (4095 * 32, 4095): Launch(),
    }
    for (rows, tokens), launch in launches.items():
        assert launch_of(rows, 132, tokens, tokens) == launch
    assert set(launches.values()) == set(LAUNCHES)
    for rule in fa3_tiles.SIZED:
        (dims,), (launch, *_), of = (rule.when[name] for name in ("head_dims", "launch", "full"))
        usual = TileProblem(dims)
        sized = usual._replace(launch=launch)
        assert fa3_tiles.choose(sized) == rule.value != fa3_tiles.choose(usual)
        assert (fa3_tiles.choose(sized._replace(full=True)) == fa3_tiles.choose(usual)) == (True not in of)
        for change in ({"kv": "paged"}, {"kv": "gathered"}, {"plain": False}):
            assert fa3_tiles.choose(sized._replace(**change)) == fa3_tiles.choose(usual._replace(**change))


def test_tiles_that_wait_to_be_widened_fit_shared_memory() -> None:
    """Behind the others, each in rings of its own."""
    for (dim_qk, dim_vo), tiles in fa3_tiles.candidates("fp8_kv").items():
        for tile in tiles:
            memory = HopperMemory.of(Fa3Spec("float16", "float16", dim_qk, dim_vo, kv_dtype="float8_e5m2", tile=tile))
            assert isinstance(memory, Fp8KvMemory)
            assert tile.staged > 0
            narrow = tile.staged * tile.cols * (memory.qk_columns + memory.vo_columns) * 64
            assert memory.map.barriers("q") == memory.map.offset("v") + tile.stages * memory.v_bytes + narrow
            assert memory.bytes <= 227 * 1024
