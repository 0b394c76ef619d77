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


def _shuffled(mode: str, x: Any, distance: int) -> Any:
    """Reads a scalar of 32 or 64 bits from another lane."""
    clamp = 0 if mode == "up" else 31
    if isinstance(x, Int32):
        return ptx.asm(f"shfl.sync.{mode}.b32 $0, $1, {distance}, {clamp}, 0xffffffff;", [Int32], [x])
    text = (
        "{.reg .b32 l, h; mov.b64 {l, h}, $1;"
        f"shfl.sync.{mode}.b32 l, l, {distance}, {clamp}, 0xffffffff;"
        f"shfl.sync.{mode}.b32 h, h, {distance}, {clamp}, 0xffffffff; mov.b64 $0, {{l, h}};}}"
    )
    return ptx.asm(text, [Int64], [x])


def from_lane(x: Any, lane: Int32) -> Any:
    """Reads a scalar of 32 or 64 bits of another lane."""
    return ptx.shuffle_from(x, lane) if isinstance(x, Int32) else ptx.shuffle_address(x, lane)


def lane_before(x: Any, lane: Int32) -> Any:
    """Returns the number of the lane before; 0 in the first."""
    return ptx.select(lane >= 1, _shuffled("up", x, 1), type(x)(0))


def inclusive_sum(x: Any, lane: Int32, most: Any) -> Any:
    """Returns the sum up to each lane, at most `most`, of numbers between 0 and that."""
    for distance in (1, 2, 4, 8, 16):
        before = ptx.select(lane >= distance, _shuffled("up", x, distance), type(x)(0))
        x = ptx.minimum(x + before, most)
    return x


def warp_sum(x: Any) -> Any:
    for distance in (1, 2, 4, 8, 16):
        x = x + _shuffled("bfly", x, distance)
    return x


def warp_max(x: Any) -> Any:
    for distance in (1, 2, 4, 8, 16):
        x = ptx.maximum(x, _shuffled("bfly", x, distance))
    return x


def clamp(x: Int32, low: Int32, high: Int32) -> Int32:
    """Returns `x` within [low, high]."""
    return ptx.minimum(ptx.maximum(x, low), high)
