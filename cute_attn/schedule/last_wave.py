"""Splits of the last wave of a launch: query tiles that fill waves stay whole, and the others are cut.

Tiles of about equal length end in waves, and where the last wave is not full, CTAs are idle for the time of a whole
tile. Splitting every tile evenly costs a partial result for each. So only the tiles of the last wave are cut, into the
number of equal parts that ends first. Example: 160 tiles, each of 34 units of time, on 132 CTAs take 68 units. Cut in
four, 40 of them make 160 parts of 11 units: the 12 CTAs that have no tile in the first wave take 36 of these meanwhile,
and all CTAs the others afterwards, so that the launch takes 45 units, and the merge.
"""

from __future__ import annotations

from cute_attn.schedule.constants import COMBINE_TIME, ITEM_TIME, MOST_PARTS, UNIT
from cute_attn.schedule.cuts import Capacity, Cut, SchedulerParams


def last_wave(number: int, longest: int, params: SchedulerParams, capacity: Capacity) -> Cut | None:
    """Returns the best cut of so many query tiles, the longest of so many kv tiles; None where there is no wave before
    the last, or no room. All tiles are taken to be as long as the longest. The planner kernel makes the same cuts.
    """
    resident, ctas = params.resident_ctas, params.num_kv_heads
    waves, rest = divmod(number * ctas, resident)
    first = waves * resident // ctas
    if not first or not rest:
        return None
    cut, idle = number - first, waves * resident - first * ctas  # CTAs that have no tile in the last full wave
    whole = longest * UNIT + ITEM_TIME
    best = None
    for most in range(2, MOST_PARTS + 1):
        size = -(-longest // most)
        parts = cut * -(-longest // size)
        fits = cut <= capacity.merges and parts <= capacity.partials and first + parts <= capacity.items
        if not fits or size < params.min_split_tiles:
            break  # nor do more parts
        part = size * UNIT + ITEM_TIME + params.partial_cost
        late = max(parts * ctas - idle * (whole // part), 0)
        time = waves * whole - -late // resident * part  # rounded up
        time += COMBINE_TIME + parts * ctas * params.partial_cost // resident
        if best is None or time < best.time:
            best = Cut(time, first, size)
    return best
