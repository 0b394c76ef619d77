"""Tile tables of the wgmma kernel: the tile of a problem by head dims and score modifications.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory. "modified" rows leave registers for
windows, mask bits, slopes and caps. Proposals: `python -m perf.search`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, PAGE_ALIGNED, tile_dims
from cute_attn.kernels.fa3.spec import HopperTile

ARCH = "sm_90a"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

# Beside 128 x 128, 192 x 96 at head dim 96 makes 1.05 of its speed from 2048 tokens on, 1.07 to 1.11 from 4096; at 72,
# whose rows are no multiple of 32 bytes, 1.33. A third stage at 192 makes 1.04 to 1.07, at 160 1.07 to 1.12. (H100)
_PLAIN = {
    (64, 64): HopperTile(192, 128, 3, 2),
    (96, 96): HopperTile(192, 96, 3, 1),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (192, 128): HopperTile(128, 128, 2, 1),
    (192, 192): HopperTile(128, 64, 3, 1, ping_pong=False),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
}
_MODIFIED = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False),
    (96, 96): HopperTile(128, 128, 2, 2),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (192, 128): HopperTile(128, 128, 2, 1),
    (192, 192): HopperTile(128, 64, 3, 1, ping_pong=False),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
}


WIDEST = 1 << 30  # keys: no `window_left` is larger


class Narrow(NamedTuple):
    """Tile of causal rows that see the keys of a window, up to `window_left`, and whose scores are not modified.
    `group`: query heads per kv head from which it pays, as these share the tile.
    """

    window_left: int
    tile: HopperTile
    group: int = 1


# Rows of few tokens compute the fewest scores that the window hides; several CTAs hide each other's first and last
# steps. H100, 4 x 4096 tokens: d 64, 64/8 heads, window 128 202 TFLOP/s (160 with the last row's tile, 118 with that of
# _MODIFIED), window 1024 412 (364, 355); d 128, window 128 214 instead of 183, window 1024 480 instead of 533.
_NARROW = {  # shortest windows first
    (64, 64): (
        Narrow(191, HopperTile(64, 48, 3, 2, ping_pong=False, per_sm=4, from_first_key=True), group=4),
        Narrow(1024, HopperTile(192, 96, 4, 2, from_first_key=True), group=4),
        Narrow(WIDEST, HopperTile(64, 64, 3, 2, ping_pong=False, per_sm=3)),
    ),
    (128, 128): (Narrow(384, HopperTile(64, 64, 2, 1, ping_pong=False, per_sm=2)),),
}
# H100, 4 x 4096 tokens, 32/8 heads, window 512: 539 TFLOP/s instead of 440.
_FP8_NARROW = {(128, 128): (Narrow(512, HopperTile(192, 64, 3, 2, ping_pong=False, from_first_key=True), group=4),)}

# Widest windows under which the heads of a group share a tile, by head dim and bits of q. At head dim 256, where tiles
# stay those of other masks: 1.02 to 1.09 times as fast under windows of 512 and 1024, the same under 4096 (H100, 4 x
# 4096 and 1 x 16384 tokens).
PACKED_WINDOWS = {(64, 16): 1024, (128, 8): 512, (256, 16): 1024}


class Sized(NamedTuple):
    """Tile of unmodified rows of 16 bits in launches of a size; `causal_only`: not where all rows see all keys."""

    tile: HopperTile
    causal_only: bool


# Launches of long requests, of few short ones, and of more short ones. TFLOP/s of this tile and of that in _PLAIN,
# causal unless said otherwise (H100): d 128, 32/8 heads, 1 x 16384 729 and 714, full 745 and 702; 1 x 1000 385 and 362;
# d 64, 32/32 heads, 16 x 1024 337 and 323; d 96, 32/8 heads, 16 x 1024 399 and 367, 1 x 1000 329 and 293, but at d 80
# 16 x 1024 full 427 and 443. d 256, 8/8 heads, relative to _PLAIN: 1 x 16384 1.012, full 1.006, but 4 x 4096 full
# 0.992: hence not in "long" launches. 64 x 197 tokens of 16 heads, full: d 64 173 and 142, d 72 136 and 106.
_LONG = Sized(HopperTile(192, 80, 3, 1), causal_only=False)
_SHORT_64 = HopperTile(64, 64, 3, 2, ping_pong=False, q_registers=64, per_sm=3)
SIZED = {
    ("long", (128, 128)): _LONG,
    ("longest", (128, 128)): _LONG,
    ("longest", (256, 256)): Sized(HopperTile(128, 64, 2, 1, ping_pong=False, q_registers=128), causal_only=False),
    ("few", (96, 96)): Sized(HopperTile(128, 128, 2, 2), causal_only=False),
    ("few", (128, 128)): Sized(HopperTile(64, 64, 2, 1, ping_pong=False, per_sm=2), causal_only=True),
    ("shortest", (64, 64)): Sized(_SHORT_64, causal_only=False),
    ("shortest", (96, 96)): Sized(HopperTile(128, 112, 2, 1), causal_only=False),
    ("short", (64, 64)): Sized(_SHORT_64, causal_only=True),
    ("short", (96, 96)): Sized(HopperTile(128, 128, 2, 2), causal_only=True),
}

_FP8 = {
    (64, 64): HopperTile(192, 128, 2, 2, ping_pong=False),
    (128, 128): HopperTile(192, 96, 2, 2, ping_pong=False),
    (256, 256): HopperTile(128, 64, 2, 2, ping_pong=False),
}
_FP8_MODIFIED = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (256, 256): HopperTile(128, 64, 2, 2, ping_pong=False),
}

# fp8 K and V under 16-bit q. Seven transform warps are up to 20 % faster than three at d 128 (H200). At d 256 ptxas
# wants more registers at launch than four warpgroups leave.
_FP8_KV = {
    (64, 64): HopperTile(192, 128, 3, 2, ping_pong=False, staged=2),
    (96, 96): HopperTile(128, 128, 2, 1, staged=2, transform_warps=7, q_registers=96),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, staged=2, transform_warps=7, q_registers=128),
    (192, 128): HopperTile(128, 112, 2, 1, staged=1, transform_warps=7),
    (192, 192): HopperTile(128, 64, 2, 1, ping_pong=False, staged=1),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False, staged=1),
}
_FP8_KV_MODIFIED = {
    **_FP8_KV,
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False, staged=2, transform_warps=7),
    (96, 96): HopperTile(128, 128, 2, 1, staged=2, transform_warps=7),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, staged=2, transform_warps=7),
}

# Rotated q and k, whatever the mask and the scores.
ROPE = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False, staged=2, transform_warps=7),
    (96, 96): HopperTile(128, 128, 2, 1, staged=1, transform_warps=7),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, staged=1, transform_warps=7),
    (192, 128): HopperTile(128, 64, 2, 1, staged=1, transform_warps=7),
    (192, 192): HopperTile(128, 64, 2, 1, ping_pong=False, staged=1),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False, staged=1),
}

# Minimum tokens per box with which pages are loaded by TMA instead of gathered by a warpgroup. A box costs TMA some 45
# clocks beside its rows; a gathered row costs the memory system more than its share of a box.
_MIN_BOX_ROWS = {dims: 16 if dims == (64, 64) else 32 for dims in HEAD_DIMS}
_MIN_FP8_BOX_ROWS = 8  # of 8-bit rows, which one warp gathers


def page_source(head_dims: tuple[int, int], page_size: int, *, fp8: bool = False, fp8_kv: bool = False) -> str:
    """Returns how pages of `page_size` tokens are loaded: `kv` of `Fa3Spec`. With fp8 q, the warps that would gather
    rows transpose V.
    """
    min_rows = _MIN_FP8_BOX_ROWS if fp8_kv else _MIN_BOX_ROWS[tile_dims(head_dims, HEAD_DIMS)]
    return "paged" if fp8 or math.gcd(page_size, PAGE_ALIGNED) >= min_rows else "gathered"


def choose(
    head_dims: tuple[int, int],
    plain: bool,
    kv: str,
    fp8: bool = False,
    fp8_kv: bool = False,
    window_left: int = -1,
    size: str = "",
    causal: bool = True,
    group: int = 1,
) -> HopperTile:
    """Returns the tile of a problem. `kv`: as in `Fa3Spec`; `fp8`: q, k and v are; `fp8_kv`: only k and v are;
    `window_left`: that of causal rows whose scores are not modified, else -1; `size`: of the launch, one of SIZES in
    `host.persistent.variant`, or "" for the tile of `_PLAIN`; `group`: query heads per kv head. Threads that gather
    need registers, which neither three MMA warpgroups leave nor those that hold q nor several CTAs.
    """
    head_dims = tile_dims(head_dims, FP8_HEAD_DIMS if fp8 else HEAD_DIMS)
    if window_left >= 0 and not fp8_kv and (found := _narrow(head_dims, kv, fp8, window_left, group)):
        return found
    if fp8:
        return (_FP8 if plain else _FP8_MODIFIED)[head_dims]
    sized = SIZED.get((size, head_dims))
    if sized and plain and kv == "dense" and not fp8_kv and (causal or not sized.causal_only):
        return sized.tile
    plain_tiles, modified_tiles = (_FP8_KV, _FP8_KV_MODIFIED) if fp8_kv else (_PLAIN, _MODIFIED)
    tile = (plain_tiles if plain else modified_tiles)[head_dims]
    aligned = fp8_kv or tile.cols % PAGE_ALIGNED == 0
    roomy = tile.mma_warpgroups == 2 and not tile.q_registers
    if (kv == "paged" and not aligned) or (kv == "gathered" and not roomy):
        return modified_tiles[head_dims]
    return tile


def _narrow(head_dims: tuple[int, int], kv: str, fp8: bool, window_left: int, group: int) -> HopperTile | None:
    """Returns the tile of causal rows under a window, if one pays. Arguments are those of `choose`."""
    if kv == "gathered":
        return None
    for narrow in (_FP8_NARROW if fp8 else _NARROW).get(head_dims, ()):
        dense = kv == "dense" or not narrow.tile.from_first_key
        shared = narrow.group == 1 or (group >= narrow.group and narrow.tile.q_box_rows % group == 0)
        if window_left <= narrow.window_left and dense and shared:
            return narrow.tile
    return None


def rope_tile(head_dims: tuple[int, int]) -> HopperTile:
    """Returns the tile of a problem whose q and k are rotated."""
    return ROPE[tile_dims(head_dims, HEAD_DIMS)]


def candidates(fp8_kv: bool = False) -> dict[tuple[int, int], list[HopperTile]]:
    """Lists every tile that `choose` may return for 16-bit q, by head dims."""
    tables = (_FP8_KV, _FP8_KV_MODIFIED) if fp8_kv else (_PLAIN, _MODIFIED)
    found = {dims: list(dict.fromkeys(table[dims] for table in tables)) for dims in HEAD_DIMS}
    if not fp8_kv:
        for dims, rows in _NARROW.items():
            found[dims] += [narrow.tile for narrow in rows]
        for (_, dims), sized in SIZED.items():
            found[dims].append(sized.tile)
    return found
