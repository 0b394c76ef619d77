"""Numbers of the cost model and of the order of items, for the host's schedule and the planner kernel alike."""

from __future__ import annotations

UNIT = 16  # of the model's time, per kv tile

# Estimates in kv tiles, not tuned on hardware. An item starts, reads its query rows and writes its result; the combine
# launch waits for the last item and then works for a while.
ITEM_COST = 2
COMBINE_COST = 3
BINS = 256  # lengths are rounded to this fraction of the largest
BALANCED = 65, 64  # a ratio: no search for a makespan below so many times the work shared equally
WORTHWHILE = 19, 20  # times the makespan without splits: the estimates are no more accurate than that
CUT_WORTHWHILE = 199, 200  # the same of a cut last wave
MOST_PARTS = 12  # of a query tile of the last wave: 3 to 11 were best in the launches that gained (H200, 2026-11-29)

# Candidates for the split size: fractions of the longest tile, and 64ths of one CTA's equal share of the work.
LONGEST_DIVISORS = (2, 3, 4, 5, 6, 8)
SHARE_FACTORS = (10, 13, 16, 21, 32, 35, 43, 48, 64, 70, 80, 96)
SHARE_DENOMINATOR = 64
CANDIDATES = len(LONGEST_DIVISORS) + len(SHARE_FACTORS)
ITEM_TIME, COMBINE_TIME = UNIT * ITEM_COST, UNIT * COMBINE_COST
IMPOSSIBLE = 1 << 55  # makespan of a candidate that exceeds the capacity

SORT_BINS = 256  # of costs, where items are ordered, and the most groups of requests that share L2
L2_ORDER_MIN_WAVES = 4  # waves of items from which on the order considers what is in L2
