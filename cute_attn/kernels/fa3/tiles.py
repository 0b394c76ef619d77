"""Tile tables of the wgmma kernel: the tile of a problem by head dims and score modifications.

Every row must compile to 0 bytes of stack and fit 227 KB of shared memory. Those that are not "plain" leave
registers for windows, mask bits, slopes and caps. Proposals: `python -m perf.tune`.
"""

from __future__ import annotations

from cute_attn.kernels.blocks.tiles import PAGE_ALIGNED, Operands, TileProblem, first_rule, pages_in_boxes, tile_rule
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.rules import Rule, above, up_to

ARCH = "sm_90a"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
WINDOWS = above(-1)  # of `window_left`; -1: none


def _serves(tile: HopperTile, problem: TileProblem) -> bool:
    """Tell whether a tile has kernels for a problem. Threads that gather rows of pages need registers, which neither
    three MMA warpgroups leave nor those that hold q nor several CTAs.
    """
    if tile.from_first_key and (problem.chunk_invariant or problem.kv == "paged" or tile.q_box_rows % problem.group):
        return False
    if problem.kv == "gathered":
        return tile.mma_warpgroups == 2 and not tile.q_registers
    return problem.kv == "dense" or tile.cols % PAGE_ALIGNED == 0 or problem.operands in ("fp8", "fp8_kv")


_BESIDE = "TFLOP/s of this tile and of that for others (H100): "
_SHORT_64 = HopperTile(64, 64, 3, 2, ping_pong=False, q_registers=64, per_sm=3)
_SHORT_128 = HopperTile(64, 64, 2, 1, ping_pong=False, per_sm=2)
_TRUE = (True,)

# Rows of few tokens compute the fewest scores that the window hides; several CTAs hide each other's first and last
# steps. Notes: 4 x 4096 tokens, at head dim 64 of 64/8 heads, else of 32/8.
_SHARED = above(3)  # query heads per kv head from which it pays, as these share the tile
_NARROW = (  # shortest windows first
    tile_rule(
        (64, 64), HopperTile(64, 48, 3, 2, ping_pong=False, per_sm=4, from_first_key=True),
        window_left=up_to(191), group=_SHARED, note=_BESIDE + "window 128 202 and 118",
    ),
    tile_rule(
        (64, 64), HopperTile(192, 96, 4, 2, from_first_key=True),
        window_left=up_to(1024), group=_SHARED, note=_BESIDE + "window 1024 412 and 355",
    ),
    tile_rule(
        (64, 64), HopperTile(64, 64, 3, 2, ping_pong=False, per_sm=3),
        window_left=WINDOWS, note=_BESIDE + "window 128 160 and 118, window 1024 364 and 355",
    ),
    tile_rule(
        (128, 128), _SHORT_128,
        window_left=up_to(384), note=_BESIDE + "window 128 214 and 183, window 1024 480 and 533",
    ),
    tile_rule(
        (128, 128), HopperTile(192, 64, 3, 2, ping_pong=False, from_first_key=True), "fp8",
        window_left=up_to(512), group=_SHARED, note=_BESIDE + "window 512 539 and 440",
    ),
)  # fmt: skip

# Launches of long requests, of few short ones, and of more short ones. Notes: causal unless said otherwise, 32/8 heads,
# 1024 tokens of 32/32 at head dim 64, 197 of 16.
_ANY, _CAUSAL = (True, False), (False,)  # values of `full`
SIZED = tuple(
    tile_rule(dims, tile, plain=_TRUE, full=full, kv=("dense",), launch=launches, note=_BESIDE + note)
    for launches, dims, tile, full, note in (
        (("long",), (128, 128), HopperTile(192, 80, 3, 1), _ANY, "1 x 16384 tokens 729 and 714, full 745 and 702"),
        (("few",), (96, 96), HopperTile(128, 128, 2, 2), _ANY, "1 x 1000 tokens 329 and 293"),
        (("few",), (128, 128), _SHORT_128, _CAUSAL, "1 x 1000 tokens 385 and 362"),
        (("shortest",), (64, 64), _SHORT_64, _ANY, "64 x 197 tokens, full 173 and 142"),
        (("shortest",), (96, 96), HopperTile(128, 112, 2, 1), _ANY, "64 x 197 tokens, d 72, full 136 and 106"),
        (("short", "shortest"), (64, 64), _SHORT_64, _CAUSAL, "16 x 1024 tokens 337 and 323"),
        (
            *(("short", "shortest"), (96, 96), HopperTile(128, 128, 2, 2), _CAUSAL),
            "16 x 1024 tokens 399 and 367, but full at d 80 427 and 443",
        ),
    )
)

_SEVEN = "up to 20 % faster with seven transform warps than with three (H200)"
_STAGES = "1.04 to 1.07 times as fast with a third stage, 1.07 to 1.12 at head dim 160 (H100)"
_ROWS = "from 2048 tokens 1.05 times as fast as 128 x 128, from 4096 1.07 to 1.11, at head dim 72 1.33 (H100)"
RULES = (  # the first that applies
    *_NARROW,
    *SIZED,
    tile_rule((64, 64), HopperTile(192, 128, 3, 2), plain=_TRUE),
    tile_rule((96, 96), HopperTile(192, 96, 3, 1), plain=_TRUE, note=_ROWS),
    tile_rule((64, 64), HopperTile(128, 128, 2, 2, ping_pong=False)),
    tile_rule((96, 96), HopperTile(128, 128, 2, 2)),
    tile_rule((128, 128), HopperTile(128, 128, 2, 2, ping_pong=False)),
    tile_rule((192, 128), HopperTile(128, 128, 2, 1)),
    tile_rule((192, 192), HopperTile(128, 64, 3, 1, ping_pong=False), note=_STAGES),
    tile_rule((256, 256), HopperTile(128, 64, 2, 1, ping_pong=False)),
    # fp8 q, k and v.
    tile_rule((64, 64), HopperTile(192, 128, 2, 2, ping_pong=False), "fp8", plain=_TRUE),
    tile_rule((128, 128), HopperTile(192, 96, 2, 2, ping_pong=False), "fp8", plain=_TRUE),
    tile_rule((64, 64), HopperTile(128, 128, 2, 2, ping_pong=False), "fp8"),
    tile_rule((128, 128), HopperTile(128, 128, 2, 2, ping_pong=False), "fp8"),
    tile_rule((256, 256), HopperTile(128, 64, 2, 2, ping_pong=False), "fp8"),
    # fp8 K and V under 16-bit q. At d 256 ptxas wants more registers at launch than four warpgroups leave.
    tile_rule((64, 64), HopperTile(192, 128, 3, 2, ping_pong=False, staged=2), "fp8_kv", plain=_TRUE),
    tile_rule((96, 96), HopperTile(128, 128, 2, 1, staged=2, transform_warps=7, q_registers=96), "fp8_kv", plain=_TRUE),
    tile_rule(
        (128, 128), HopperTile(128, 128, 2, 1, ping_pong=False, staged=2, transform_warps=7, q_registers=128), "fp8_kv",
        plain=_TRUE, note=_SEVEN,
    ),
    tile_rule((96, 96), HopperTile(128, 128, 2, 1, staged=2, transform_warps=7), "fp8_kv"),
    tile_rule(
        (128, 128), HopperTile(128, 128, 2, 1, ping_pong=False, staged=2, transform_warps=7), "fp8_kv", note=_SEVEN
    ),
    tile_rule((192, 128), HopperTile(128, 112, 2, 1, staged=1, transform_warps=7), "fp8_kv"),
    # Rotated q and k, whatever the mask and the scores. Staged tiles hold 16-bit rows, so that fewer fit.
    tile_rule((96, 96), HopperTile(128, 128, 2, 1, staged=1, transform_warps=7), "rope"),
    tile_rule((128, 128), HopperTile(128, 128, 2, 1, ping_pong=False, staged=1, transform_warps=7), "rope"),
    tile_rule((192, 128), HopperTile(128, 64, 2, 1, staged=1, transform_warps=7), "rope"),
    tile_rule((64, 64), HopperTile(128, 128, 2, 2, ping_pong=False, staged=2, transform_warps=7), "fp8_kv", "rope"),
    tile_rule((192, 192), HopperTile(128, 64, 2, 1, ping_pong=False, staged=1), "fp8_kv", "rope"),
    tile_rule((256, 256), HopperTile(128, 64, 2, 1, ping_pong=False, staged=1), "fp8_kv", "rope"),
)  # fmt: skip


def page_source(head_dims: tuple[int, int], page_size: int, operands: Operands = "") -> str:
    """Returns how pages of `page_size` tokens are loaded: `kv` of `Fa3Spec`. The warps that would gather rows transpose
    V of fp8, and rotate; of 8-bit rows under 16-bit q one warp gathers.
    """
    boxes = operands in ("fp8", "rope") or pages_in_boxes(head_dims, page_size, operands)
    return "paged" if boxes else "gathered"


def rule_of(problem: TileProblem) -> Rule[HopperTile]:
    """Return the rule of a problem's tile."""
    return first_rule((rule for rule in RULES if _serves(rule.value, problem)), problem, HEAD_DIMS)
