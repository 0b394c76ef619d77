"""Tile table of the wgmma kernel, as data: which tile a problem gets, by head dims and by what is done to its scores.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory. "modified" rows leave registers for
windows, mask bits, slopes and caps. Proposals: `python -m perf.search`.
"""

from __future__ import annotations

import math

from cute_attn.kernels.fa3.spec import HopperTile

ARCH = "sm_90a"
FP8_HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
PAGE_ALIGNED = 64  # tiles of paged keys are multiples of it, so that pages of any power of two make few boxes

_PLAIN = {
    (64, 64): HopperTile(192, 128, 3, 2),
    (96, 96): HopperTile(128, 128, 2, 2),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (192, 128): HopperTile(128, 128, 2, 1),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
}
_MODIFIED = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False),
    (96, 96): HopperTile(128, 128, 2, 2),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (192, 128): HopperTile(128, 128, 2, 1),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
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

# K and V widened from 8 bits. Seven helpers are up to 20 % faster than three at d 128 (H200). At d 256 ptxas wants
# more registers at launch than four warpgroups leave.
_WIDENED = {
    (64, 64): HopperTile(192, 128, 3, 2, ping_pong=False, arriving=2),
    (96, 96): HopperTile(128, 128, 2, 1, arriving=2, helpers=7, q_registers=True),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, arriving=2, helpers=7, q_registers=True),
    (192, 128): HopperTile(128, 112, 2, 1, arriving=1, helpers=7),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False, arriving=1),
}
_WIDENED_MODIFIED = {
    **_WIDENED,
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False, arriving=2, helpers=7),
    (96, 96): HopperTile(128, 128, 2, 1, arriving=2, helpers=7),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, arriving=2, helpers=7),
}

# The least tokens of a box, from which on pages come by TMA and not by a warpgroup that gathers rows. A box costs TMA
# some 45 clocks beside its rows, a gathered row the memory system more than its share of a box.
_LEAST_BOX = {(64, 64): 16, (96, 96): 32, (128, 128): 32, (192, 128): 32, (256, 256): 32}
_LEAST_NARROW_BOX = 8  # of 8-bit rows, which one warp gathers


def page_source(head_dims: tuple[int, int], page_size: int, widened: bool = False) -> str:
    """How pages of so many tokens are brought in: `kv` of `Fa3Spec`."""
    least = _LEAST_NARROW_BOX if widened else _LEAST_BOX[head_dims]
    return "paged" if math.gcd(page_size, PAGE_ALIGNED) >= least else "gathered"


def choose(head_dims: tuple[int, int], plain: bool, kv: str, fp8: bool = False, widened: bool = False) -> HopperTile:
    """`kv`: as of `Fa3Spec`. `fp8`: q, k and v are, `widened`: k and v alone. Threads that gather need registers, which
    three math groups do not leave, nor those that hold q.
    """
    if fp8:
        return (_FP8 if plain else _FP8_MODIFIED)[head_dims]
    plain_tiles, modified_tiles = (_WIDENED, _WIDENED_MODIFIED) if widened else (_PLAIN, _MODIFIED)
    tile = (plain_tiles if plain else modified_tiles)[head_dims]
    aligned = widened or tile.cols % PAGE_ALIGNED == 0
    roomy = tile.math_groups == 2 and not tile.q_registers
    if (kv == "paged" and not aligned) or (kv == "gathered" and not roomy):
        return modified_tiles[head_dims]
    return tile


def candidates(widened: bool = False) -> dict[tuple[int, int], list[HopperTile]]:
    """Every tile that `choose` may answer for q of 16 bits, by head dims."""
    tables = (_WIDENED, _WIDENED_MODIFIED) if widened else (_PLAIN, _MODIFIED)
    return {dims: list(dict.fromkeys(table[dims] for table in tables)) for dims in HEAD_DIMS}
