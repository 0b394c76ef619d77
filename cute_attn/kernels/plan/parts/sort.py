"""Stable counting sort of keys from 0 to 255 by all threads of the planner.

Every warp takes a segment of the input in order. The first pass counts its keys; sums over keys and warps say where the
segment's numbers of each key begin; the second pass places them, 32 at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.plan.parts.arithmetic import add_shared, equal_lanes
from cute_attn.kernels.plan.parts.cta import Smem
from cute_attn.schedule.constants import SORT_BINS

NO_LIMIT = (1 << 31) - 1


@cute.jit
def sort(cta: cutlass.Constexpr, count: Int32, key: cutlass.Constexpr, place: cutlass.Constexpr) -> None:
    """Calls `place(i, position)` for every i < count; positions ascend by `key(i)`, then by i.

    The caller synchronises before (what keys read) and after (what places write).
    """
    counts = cta.base + Int32(Smem.histograms) + cta.warp * Int32(4 * SORT_BINS)
    _count_keys(cta, count, key, counts)
    _start_positions(cta)
    begin, end = cta.segment(count)
    while begin < end:
        i = begin + cta.lane
        exists = i < end
        mine = Int32(SORT_BINS)  # of lanes past the end
        if exists:
            mine = key(i)
        equal = equal_lanes(mine)
        rank = ptx.count_ones(equal & ((Int32(1) << cta.lane) - Int32(1)))
        start = Int32(0)
        if exists:
            start = ptx.ld_shared_b32(counts + mine * 4)
        ptx.sync_warp()
        if cutlass.and_(exists, rank == 0):
            add_shared(counts + mine * 4, ptx.count_ones(equal))
        ptx.sync_warp()
        if exists:
            place(i, start + rank)
        begin = begin + Int32(32)


@cute.jit
def _count_keys(cta: cutlass.Constexpr, count: Int32, key: cutlass.Constexpr, counts: Int32) -> None:
    for step in cutlass.range(SORT_BINS // 32, unroll=1):
        ptx.st_shared_b32(counts + (step * 32 + cta.lane) * 4, 0, Int32(0))
    ptx.sync_warp()
    begin, end = cta.segment(count)
    i = begin + cta.lane
    while i < end:
        add_shared(counts + key(i) * 4, Int32(1))
        i = i + Int32(32)
    ptx.sync_threads()


@cute.jit
def _start_positions(cta: cutlass.Constexpr) -> None:
    """Replaces the counts of every warp by the positions of its first numbers."""
    column = cta.base + Int32(Smem.histograms) + cta.thread * 4
    total = Int32(0)
    if cta.thread < SORT_BINS:
        for warp in cutlass.range(cta.warps, unroll=4):
            total = total + ptx.ld_shared_b32(column + warp * Int32(4 * SORT_BINS))
    start, _ = cta.exclusive_sum(total, Int32(NO_LIMIT))
    if cta.thread < SORT_BINS:
        for warp in cutlass.range(cta.warps, unroll=4):
            here = column + warp * Int32(4 * SORT_BINS)
            count = ptx.ld_shared_b32(here)
            ptx.st_shared_b32(here, 0, start)
            start = start + count
    ptx.sync_threads()
