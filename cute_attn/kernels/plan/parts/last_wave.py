"""The cut of the last wave: `schedule.last_wave`, whose numbers these are bit by bit."""

from functools import reduce
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.plan.parts.arithmetic import quotient_up, warp_max, wide_quotient
from cute_attn.schedule.constants import COMBINE_TIME, IMPOSSIBLE, ITEM_TIME, MOST_PARTS, UNIT

LANES = 32


class Cut(NamedTuple):
    """Query tiles from `first` on are split into parts of at most `size` kv tiles. `size` 0: none is split."""

    time: Int64
    first: Int32
    size: Int32


def last_wave(p: Any, lane: Int32, num_tiles: Int32, longest: Int32) -> Cut:
    """Returns the best cut, for all lanes: each estimates one number of parts. `time` IMPOSSIBLE: there is none."""
    waves = ptx.divide(num_tiles * p.num_kv_heads, p.resident_ctas)
    first = ptx.divide(waves * p.resident_ctas, p.num_kv_heads)
    tiles, idle = num_tiles - first, waves * p.resident_ctas - first * p.num_kv_heads
    size = ptx.maximum(quotient_up(longest, lane + Int32(2)), Int32(1))
    parts = tiles * quotient_up(longest, size)
    whole = longest * Int32(UNIT) + Int32(ITEM_TIME)
    part = size * Int32(UNIT) + Int32(ITEM_TIME) + p.partial_cost
    late = ptx.maximum(parts * p.num_kv_heads - idle * ptx.divide(whole, part), Int32(0))
    time = Int64(waves) * Int64(whole) + Int64(quotient_up(late, p.resident_ctas)) * Int64(part)
    traffic = wide_quotient(Int64(parts * p.num_kv_heads) * Int64(p.partial_cost), Int64(p.resident_ctas))
    time = time + Int64(COMBINE_TIME) + traffic
    conditions = (
        lane < MOST_PARTS - 1,
        cutlass.and_(first > 0, waves * p.resident_ctas < num_tiles * p.num_kv_heads),
        size >= p.min_split_tiles,
        tiles <= p.merge_capacity,
        parts <= p.partial_capacity,
        first + parts <= p.item_capacity,
    )
    time = ptx.select(reduce(cutlass.and_, conditions), time, Int64(IMPOSSIBLE))
    best = Int64(0) - warp_max(Int64(0) - (time * Int64(LANES) + Int64(lane)))
    time = wide_quotient(best, Int64(LANES))
    lane = Int32(best - time * Int64(LANES))
    return Cut(time, first, quotient_up(longest, lane + Int32(2)))
