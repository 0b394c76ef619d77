"""What the tiles of persistent kernels are chosen by."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

from cute_attn.kernels.rules import Rule, first

T = TypeVar("T")  # a family's tile
Dims = tuple[int, int]  # of qk and vo

Operands = Literal["", "fp8", "fp8_kv", "rope"]  # 16 bits; fp8 q, k and v; only k and v narrower; q and k are rotated

FP8_HEAD_DIMS = ((64, 64), (128, 128), (256, 256))
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
PAGE_ALIGNED = 64  # tiles of paged keys are multiples of it, so that pages of any power of two need few boxes


def tile_dims(head_dims: tuple[int, int], table: tuple[tuple[int, int], ...] = HEAD_DIMS) -> tuple[int, int]:
    """Returns the head dims whose tile these have: the smallest of the table that contain them. TMA fills columns past
    the end with zeros; products and stores take the problem's own head dims.
    """
    return next(dims for dims in table if head_dims[0] <= dims[0] and head_dims[1] <= dims[1])


def tile_rows(rows: int, heads: int) -> int:
    """Returns the rows of a query tile that are used: those of whole tokens, which one box of TMA brings."""
    return rows // heads * heads


def pages_in_boxes(head_dims: tuple[int, int], page_size: int, operands: Operands) -> bool:
    """Tells whether pages of so many tokens are loaded by TMA instead of gathered: if a box has enough of them. A box
    costs TMA some 45 clocks beside its rows (measured on Hopper); a gathered row costs the memory system more than its
    share of a box. At head dimension 64, K and V of 128 keys take 976 clocks in boxes of 16 rows and 1696 in boxes of
    8, of the 1380 that two query tiles of fa4 compute; at 128, boxes of 32 take 1232 of 2048 clocks, boxes of 16 1952.
    """
    narrow = max(head_dims) <= 64
    least = 8 if operands == "fp8_kv" else 16 if narrow else 32  # 8: of 8-bit rows under 16-bit q
    return math.gcd(page_size, PAGE_ALIGNED) >= least


# Size of a launch, as far as tiles may depend on it ("": not): requests of many tokens; short ones with few query rows
# per SM, and with more. `kernels.host.persistent.family.launch_of` draws the lines.
Launch = Literal["", "long", "few", "short", "shortest"]


class TileProblem(NamedTuple):
    """What a tile is chosen by."""

    head_dims: tuple[int, int]
    kv: str = "dense"  # as in the spec
    operands: Operands = ""
    plain: bool = True  # scores are not modified, nor masked but at the length and the diagonal
    full: bool = False  # all rows see all keys
    window_left: int = -1  # of causal rows where nothing else masks keys or modifies scores, else -1
    group: int = 1  # query heads per kv head
    launch: Launch = ""
    chunk_invariant: bool = False  # kv tiles must begin at the same keys whatever rows share a tile


def tile_rule(dims: Dims, tile: T, *operands: Operands, note: str = "", **when: Collection[Any]) -> Rule[T]:
    """Make a rule of problems with these head dims and operands; without operands those of 16 bits."""
    return Rule(tile, {"head_dims": (dims,), "operands": operands or ("",), **when}, note)


def first_rule(rules: Iterable[Rule[T]], problem: TileProblem, table: tuple[Dims, ...]) -> Rule[T]:
    """Return the first rule for a problem, by the head dims of the table that contain its own."""
    dims = tile_dims(problem.head_dims, FP8_HEAD_DIMS if problem.operands == "fp8" else table)
    return first(rules, {**problem._asdict(), "head_dims": dims})
