"""The cut of the last wave of equal query tiles: `schedule.last_wave`, whose numbers these are bit by bit."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.plan.parts.arithmetic import least, most, quotient_up, wide_quotient
from cute_attn.schedule.constants import ITEM_TIME, UNIT
from cute_attn.schedule.last_wave import MOST_PARTS, OVERHEAD, WORTHWHILE


class Cut(NamedTuple):
    """How the last query tiles are cut. `first`: of these tiles; no tile has its number where none is cut."""

    first: Int32
    long_parts: Int32  # of a tile; what remains is one more part
    kv_tiles: Int32  # of a long part


def cut(p: Any, num_tiles: Int32, longest: Int32, total: Int64, chunk: Int32) -> Cut:
    """Returns how to cut query tiles. `longest`, `total`: kv tiles that one sees, and all; `chunk`: of an even split or
    0.
    """
    launched = num_tiles * p.num_kv_heads
    waves = ptx.divide(launched, p.resident_ctas)
    tiles = launched - waves * p.resident_ctas
    some = most(tiles, Int32(1))
    parts = least(ptx.divide(p.resident_ctas, some), Int32(MOST_PARTS))
    idle = p.resident_ctas - parts * some
    at_once = idle == 0  # all parts run at once
    parts, idle = ptx.select(at_once, parts - Int32(1), parts), ptx.select(at_once, some, idle)
    rests = Int64(quotient_up(some, idle))  # that one CTA takes
    start = Int64(Int32(ITEM_TIME) + p.partial_cost)
    part = (Int64(parts) * rests + Int64(1)) * Int64(UNIT)
    whole = Int64(longest) * Int64(UNIT)
    long = Int32(wide_quotient(rests * (whole + start) - start + part - Int64(1), part))
    items = quotient_up(some, p.num_kv_heads)
    before = Int64(waves + Int32(1)) * (whole + Int64(ITEM_TIME))
    after = before - (whole - Int64(long) * Int64(UNIT)) + Int64(OVERHEAD)
    conditions = (
        cutlass.and_(p.cuts_last_wave != 0, p.window_left < 0),
        cutlass.and_(p.fixed_chunk == 0, chunk == 0),
        cutlass.and_(waves > 0, tiles > 0),
        Int64(longest) * Int64(num_tiles) == total,
        parts > 0,
        items <= p.merge_capacity,
        items * (parts + Int32(1)) <= p.partial_capacity,
        num_tiles + items * parts <= p.item_capacity,
        after * Int64(WORTHWHILE[1]) <= before * Int64(WORTHWHILE[0]),
        longest > parts * long,
    )
    pays = conditions[0]
    for condition in conditions[1:]:
        pays = cutlass.and_(pays, condition)
    return Cut(ptx.select(pays, num_tiles - items, num_tiles), parts, long)
