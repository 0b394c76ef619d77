"""Integer arithmetic, shared-memory atomics and warp operations of the planner."""

from typing import Any

from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx


def quotient_up(a: Int32, b: Int32) -> Int32:
    return ptx.divide(a + b - Int32(1), b)


wide_quotient = ptx.arithmetic("div.u64", Int64)  # a >= 0 by b > 0, rounding down
load_shared_wide, store_shared_wide = ptx.Load("shared", Int64), ptx.Store("shared", Int64)


def add_shared(address: Int32, value: Int32) -> None:
    ptx.asm("red.shared.add.u32 [$0], $1;", [], [address, value])


def add_shared_wide(address: Int32, value: Int64) -> None:
    ptx.asm("red.shared.add.u64 [$0], $1;", [], [address, value])


def raise_shared(address: Int32, value: Int32) -> None:
    """Stores the larger of the number in memory and `value`; both are >= 0."""
    ptx.asm("red.shared.max.u32 [$0], $1;", [], [address, value])


def equal_lanes(x: Int32) -> Int32:
    """Returns the mask of the lanes that hold the same number."""
    return ptx.asm("match.any.sync.b32 $0, $1, 0xffffffff;", [Int32], [x])


def lane_before(x: Any, lane: Int32) -> Any:
    """Returns the number of the lane before; 0 in the first."""
    return ptx.select(lane >= 1, ptx.shuffle_up(x, 1), type(x)(0))


def inclusive_sum(x: Any, lane: Int32, most: Any) -> Any:
    """Returns the sum up to each lane, at most `most`, of numbers between 0 and that."""
    for distance in (1, 2, 4, 8, 16):
        before = ptx.select(lane >= distance, ptx.shuffle_up(x, distance), type(x)(0))
        x = ptx.minimum(x + before, most)
    return x


def warp_sum(x: Any) -> Any:
    return ptx.reduce_lanes(lambda a, b: a + b, x)


def warp_max(x: Any) -> Any:
    return ptx.reduce_lanes(ptx.maximum, x)


def clamp(x: Int32, low: Int32, high: Int32) -> Int32:
    """Returns `x` within [low, high]."""
    return ptx.minimum(ptx.maximum(x, low), high)
