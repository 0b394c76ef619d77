"""Tile tables of the wgmma kernel: the tile of a problem by head dims and score modifications.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory. Those that are not "plain" leave
registers for windows, mask bits, slopes and caps. Proposals: `python -m perf.tune`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cute_attn.kernels.blocks.tiles import (
    FP8_HEAD_DIMS,
    PAGE_ALIGNED,
    Operands,
    TileProblem,
    pages_in_boxes,
    tile_dims,
)
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.rules import Rule, above, first, up_to

ARCH = "sm_90a"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
WINDOWS = above(-1)  # of `window_left`; -1: none

TileRule = Rule[HopperTile]


def _rule(dims: tuple[int, int], tile: HopperTile, operands: Operands = "", **when: Collection[Any]) -> TileRule:
    """Make a rule of problems with these head dims and operands."""
    return Rule(tile, {"head_dims": (dims,), "operands": (operands,), **when})


def _serves(tile: HopperTile, problem: TileProblem) -> bool:
    """Tell whether a tile has kernels for a problem. Threads that gather rows of pages need registers, which neither
    three MMA warpgroups leave nor those that hold q nor several CTAs.
    """
    if tile.from_first_key and (problem.chunk_invariant or problem.kv == "paged" or tile.q_box_rows % problem.group):
        return False
    if problem.kv == "gathered":
        return tile.mma_warpgroups == 2 and not tile.q_registers
    return problem.kv == "dense" or tile.cols % PAGE_ALIGNED == 0 or problem.operands in ("fp8", "fp8_kv")


# Beside 128 x 128, 192 x 96 at head dim 96 makes 1.05 of its speed from 2048 tokens on, 1.07 to 1.11 from 4096; at 72,
# whose rows are no multiple of 32 bytes, 1.33. A third stage at 192 makes 1.04 to 1.07, at 160 1.07 to 1.12. (H100)
_PLAIN = {
    (64, 64): HopperTile(192, 128, 3, 2),
    (96, 96): HopperTile(192, 96, 3, 1),
}
_16_BIT = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False),
    (96, 96): HopperTile(128, 128, 2, 2),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (192, 128): HopperTile(128, 128, 2, 1),
    (192, 192): HopperTile(128, 64, 3, 1, ping_pong=False),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False),
}


# Rows of few tokens compute the fewest scores that the window hides; several CTAs hide each other's first and last
# steps. H100, 4 x 4096 tokens: d 64, 64/8 heads, window 128 202 TFLOP/s (160 with the last row's tile, 118 with that of
# _16_BIT), window 1024 412 (364, 355); d 128, window 128 214 instead of 183, window 1024 480 instead of 533.
_SHARED = above(3)  # query heads per kv head from which it pays, as these share the tile
_NARROW = (  # shortest windows first
    _rule(
        (64, 64), HopperTile(64, 48, 3, 2, ping_pong=False, per_sm=4, from_first_key=True),
        window_left=up_to(191), group=_SHARED,
    ),
    _rule((64, 64), HopperTile(192, 96, 4, 2, from_first_key=True), window_left=up_to(1024), group=_SHARED),
    _rule((64, 64), HopperTile(64, 64, 3, 2, ping_pong=False, per_sm=3), window_left=WINDOWS),
    _rule((128, 128), HopperTile(64, 64, 2, 1, ping_pong=False, per_sm=2), window_left=up_to(384)),
    # H100, 4 x 4096 tokens, 32/8 heads, window 512: 539 TFLOP/s instead of 440.
    _rule(
        (128, 128), HopperTile(192, 64, 3, 2, ping_pong=False, from_first_key=True), "fp8",
        window_left=up_to(512), group=_SHARED,
    ),
)  # fmt: skip

# Launches of long requests, of few short ones, and of more short ones. TFLOP/s of this tile and of that for others,
# causal unless said otherwise (H100): d 128, 32/8 heads, 1 x 16384 729 and 714, full 745 and 702; 1 x 1000 385 and 362;
# d 64, 32/32 heads, 16 x 1024 337 and 323; d 96, 32/8 heads, 16 x 1024 399 and 367, 1 x 1000 329 and 293, but at d 80
# 16 x 1024 full 427 and 443. 64 x 197 tokens of 16 heads, full: d 64 173 and 142, d 72 136 and 106.
_SHORT_64 = HopperTile(64, 64, 3, 2, ping_pong=False, q_registers=64, per_sm=3)
_ANY, _CAUSAL = (True, False), (False,)  # values of `full`
SIZED = tuple(
    _rule(dims, tile, plain=(True,), full=full, kv=("dense",), launch=launches)
    for launches, dims, tile, full in (
        (("long",), (128, 128), HopperTile(192, 80, 3, 1), _ANY),
        (("few",), (96, 96), HopperTile(128, 128, 2, 2), _ANY),
        (("few",), (128, 128), HopperTile(64, 64, 2, 1, ping_pong=False, per_sm=2), _CAUSAL),
        (("shortest",), (64, 64), _SHORT_64, _ANY),
        (("shortest",), (96, 96), HopperTile(128, 112, 2, 1), _ANY),
        (("short", "shortest"), (64, 64), _SHORT_64, _CAUSAL),
        (("short", "shortest"), (96, 96), HopperTile(128, 128, 2, 2), _CAUSAL),
    )
)

_FP8_PLAIN = {
    (64, 64): HopperTile(192, 128, 2, 2, ping_pong=False),
    (128, 128): HopperTile(192, 96, 2, 2, ping_pong=False),
}
_FP8 = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False),
    (128, 128): HopperTile(128, 128, 2, 2, ping_pong=False),
    (256, 256): HopperTile(128, 64, 2, 2, ping_pong=False),
}

# fp8 K and V under 16-bit q. Seven transform warps are up to 20 % faster than three at d 128 (H200). At d 256 ptxas
# wants more registers at launch than four warpgroups leave.
_FP8_KV_PLAIN = {
    (64, 64): HopperTile(192, 128, 3, 2, ping_pong=False, staged=2),
    (96, 96): HopperTile(128, 128, 2, 1, staged=2, transform_warps=7, q_registers=96),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, staged=2, transform_warps=7, q_registers=128),
}
_FP8_KV = {
    (64, 64): HopperTile(128, 128, 2, 2, ping_pong=False, staged=2, transform_warps=7),
    (96, 96): HopperTile(128, 128, 2, 1, staged=2, transform_warps=7),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, staged=2, transform_warps=7),
    (192, 128): HopperTile(128, 112, 2, 1, staged=1, transform_warps=7),
    (192, 192): HopperTile(128, 64, 2, 1, ping_pong=False, staged=1),
    (256, 256): HopperTile(128, 64, 2, 1, ping_pong=False, staged=1),
}

# Rotated q and k, whatever the mask and the scores. Staged tiles hold 16-bit rows, so that fewer fit.
_ROPE = {
    **_FP8_KV,
    (96, 96): HopperTile(128, 128, 2, 1, staged=1, transform_warps=7),
    (128, 128): HopperTile(128, 128, 2, 1, ping_pong=False, staged=1, transform_warps=7),
    (192, 128): HopperTile(128, 64, 2, 1, staged=1, transform_warps=7),
}

_PLAIN_OF: dict[Operands, dict[tuple[int, int], HopperTile]] = {"": _PLAIN, "fp8": _FP8_PLAIN, "fp8_kv": _FP8_KV_PLAIN}
_ANY_OF: dict[Operands, dict[tuple[int, int], HopperTile]] = {
    "": _16_BIT, "fp8": _FP8, "fp8_kv": _FP8_KV, "rope": _ROPE,
}  # fmt: skip
RULES = (  # the first that applies
    *_NARROW,
    *SIZED,
    *(_rule(dims, tile, kind, plain=(True,)) for kind, tiles in _PLAIN_OF.items() for dims, tile in tiles.items()),
    *(_rule(dims, tile, kind) for kind, tiles in _ANY_OF.items() for dims, tile in tiles.items()),
)


def page_source(head_dims: tuple[int, int], page_size: int, operands: Operands = "") -> str:
    """Returns how pages of `page_size` tokens are loaded: `kv` of `Fa3Spec`. The warps that would gather rows transpose
    V of fp8, and rotate; of 8-bit rows under 16-bit q one warp gathers.
    """
    boxes = operands in ("fp8", "rope") or pages_in_boxes(head_dims, page_size, operands)
    return "paged" if boxes else "gathered"


def choose(problem: TileProblem) -> HopperTile:
    """Return the tile of a problem."""
    operands = problem.operands
    dims = tile_dims(problem.head_dims, FP8_HEAD_DIMS if operands == "fp8" else HEAD_DIMS)
    serving = (rule for rule in RULES if _serves(rule.value, problem))
    return first(serving, {**problem._asdict(), "head_dims": dims}).value
