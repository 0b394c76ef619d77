"""Splits of the last wave of a launch whose query tiles all see equally many keys.

Equal tiles end in waves, and where the last wave is not full, CTAs are idle for the time of a whole tile. Splitting
every tile costs more than that. So only those of the last wave are cut: each into long parts that run at once, one per
CTA, and a short rest; CTAs without a long part take the rests one after the other. Eight waves of which the last has
100 tiles for 132 CTAs end 0.2 tiles earlier: 100 CTAs run 4/5 of a tile, and 32 the 100 rests of 1/5.
"""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.schedule.constants import ITEM_TIME, UNIT
from cute_attn.schedule.cost_model import Capacity, Device

# Parts instead of whole tiles, and merging them, took 32 to 47 us in seven rows of d 64, 128 and 256, 4096 to 16384
# tokens (H100): some 30 times what a kv tile takes.
OVERHEAD = 30 * UNIT
WORTHWHILE = 199, 200  # times the launch as it was; what it estimates at 0.7 to 4 % gained 0 to 5 (H100, H200)
MOST_PARTS = 8  # long ones of a tile; launches of fewer tiles than an eighth of the CTAs have no waves to speak of


class LastWave(NamedTuple):
    """How the last work items of a launch are cut, those of every block of heads."""

    items: int
    kv_tiles: int  # of a long part; what remains of an item is one more part


def last_wave(items: int, kv_tiles: int, device: Device, capacity: Capacity) -> LastWave | None:
    """Returns how to cut the last of so many items, each of so many kv tiles; None where that does not pay. The planner
    kernel makes the same cuts.
    """
    waves, tiles = divmod(items * device.ctas_per_item, device.resident_ctas)
    if not waves or not tiles:
        return None
    parts = min(device.resident_ctas // tiles, MOST_PARTS)
    idle = device.resident_ctas - parts * tiles
    if not idle:  # then all parts run at once
        parts, idle = parts - 1, tiles
    if not parts:
        return None
    rests, start = -(-tiles // idle), ITEM_TIME + device.partial_cost  # rests that one CTA takes; time besides kv tiles
    long = -(-(rests * (kv_tiles * UNIT + start) - start) // ((parts * rests + 1) * UNIT))
    cut = LastWave(-(-tiles // device.ctas_per_item), long)
    fits = cut.items <= capacity.merges and cut.items * (parts + 1) <= capacity.partials
    fits = fits and items + cut.items * parts <= capacity.items
    before = (waves + 1) * (kv_tiles * UNIT + ITEM_TIME)
    after = before - (kv_tiles - long) * UNIT + OVERHEAD
    pays = after * WORTHWHILE[1] <= before * WORTHWHILE[0]
    return cut if fits and pays and kv_tiles > parts * long else None
