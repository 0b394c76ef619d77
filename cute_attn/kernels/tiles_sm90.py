"""Tile table of the wgmma kernel, as data: which tile a problem gets, by head dims and by what is done to its scores.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory. "modified" rows leave registers for
windows, mask bits, slopes and caps. On an H200 a turn at issuing products is worth 3 % at head dim 64, nothing at 128,
and costs 1 % at 256; holding exponentials before the wait for the output gains 3 % at 64 and loses 2 % at 128.
"""

from __future__ import annotations

from cute_attn.kernels.spec import HopperTile

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
PAGE_ALIGNED = 64  # tiles of paged keys are multiples of it, so that pages of any power of two make few boxes

_PLAIN = {
    (64, 64): HopperTile(192, 128, 2, 2),
    (96, 96): HopperTile(128, 128, 2, 2, pinned=False),
    (128, 128): HopperTile(128, 128, 2, 2, pinned=False),
    (192, 128): HopperTile(128, 128, 2, 1, pinned=False),
    (256, 256): HopperTile(128, 80, 2, 1, ping_pong=False),
}
_MODIFIED = {
    (64, 64): HopperTile(128, 128, 2, 2),
    (96, 96): HopperTile(128, 128, 2, 2, pinned=False),
    (128, 128): HopperTile(128, 128, 2, 2, pinned=False),
    (192, 128): HopperTile(128, 128, 2, 1, pinned=False),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
}


def choose(head_dims: tuple[int, int], plain: bool, paged: bool) -> HopperTile:
    tile = (_PLAIN if plain else _MODIFIED)[head_dims]
    if paged and tile.cols % PAGE_ALIGNED:
        return _MODIFIED[head_dims]
    return tile


def candidates() -> dict[tuple[int, int], list[HopperTile]]:
    """Every tile that `choose` may answer, by head dims."""
    return {dims: list(dict.fromkeys((_PLAIN[dims], _MODIFIED[dims]))) for dims in HEAD_DIMS}
