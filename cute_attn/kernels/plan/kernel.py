"""Planner kernel: one CTA reads the lengths of a batch in device memory and writes its schedule.

The schedule is one of a launch of fixed size: items, then zeros up to where the schedule before it ended. Stages, with
a barrier between them:

    query tiles   of every request, and the kv tiles that they see
    split size    by the cost model: a warp per candidate
    splits        in the order of tiles, and the merge records
    records       of items, by a stable counting sort
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.plan.parts.arithmetic import (
    add_shared_wide,
    load_shared_wide,
    raise_shared,
    warp_max,
    warp_sum,
)
from cute_attn.kernels.plan.parts.cta import THREADS, Cta, PlanParams, Smem
from cute_attn.kernels.plan.parts.records import Records
from cute_attn.kernels.plan.parts.split_size import SplitSize
from cute_attn.kernels.plan.spec import PlanSpec
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS


class PlanProgram(GridProgram):
    params = PlanParams

    def __init__(self, spec: PlanSpec, arch: str) -> None:
        self.block = (THREADS, 1, 1)
        self.smem_bytes = Smem.bytes

    @cute.kernel
    def kernel(self, p: PlanParams) -> None:
        cta = Cta(p, shared_memory(), Int32(cute.arch.thread_idx()[0]))
        old_items = ptx.ld_global_u32(p.counts)
        old_merges = ptx.ld_global_u32(p.counts + Int64(4))
        if cta.thread < Smem.accumulators // 4:
            ptx.st_shared_b32(cta.base + cta.thread * 4, 0, Int32(0))
        ptx.sync_threads()

        num_tiles, keys, longest_kv = cta.count_tiles()
        self.tell(cta, Smem.longest_kv, warp_max(longest_kv), raise_shared)
        self.tell(cta, Smem.total_kv, warp_sum(keys), add_shared_wide)
        ptx.sync_threads()
        longest, total = cta.make_tiles(num_tiles)
        self.tell(cta, Smem.longest, warp_max(longest), raise_shared)
        self.tell(cta, Smem.total, warp_sum(total), add_shared_wide)
        ptx.sync_threads()

        longest = ptx.ld_shared_b32(cta.base + Int32(Smem.longest))
        total = load_shared_wide(cta.base + Int32(Smem.total))
        first, chunk = Int32(0), Int32(0)
        if p.fixed_chunk == 0:
            first, chunk = SplitSize(cta, longest, total).find(num_tiles)
        records = Records(cta, first, chunk)
        num_items, num_merges, longest_item = records.make_splits(num_tiles)
        self.tell(cta, Smem.longest_item, warp_max(longest_item), raise_shared)
        ptx.sync_threads()
        num_items, num_merges = ptx.minimum(num_items, p.item_capacity), ptx.minimum(num_merges, p.merge_capacity)
        records.write_items(
            num_items,
            num_merges,
            ptx.ld_shared_b32(cta.base + Int32(Smem.longest_item)),
            ptx.ld_shared_b32(cta.base + Int32(Smem.longest_kv)),
            load_shared_wide(cta.base + Int32(Smem.total_kv)),
        )
        fresh = p.fresh != 0
        old_items = ptx.select(fresh, p.item_capacity, ptx.minimum(old_items, p.item_capacity))
        old_merges = ptx.select(fresh, p.merge_capacity, ptx.minimum(old_merges, p.merge_capacity))
        self.clear(cta, p.items, ITEM_INTS, num_items, old_items)
        self.clear(cta, p.merges, MERGE_INTS, num_merges, old_merges)
        if cta.thread == 0:
            ptx.st_global_v2(p.counts, 0, [num_items, num_merges])

    @cute.jit
    def tell(self, cta: cutlass.Constexpr, offset: cutlass.Constexpr, x: Any, add: cutlass.Constexpr) -> None:
        """Adds a warp's number to one in shared memory, as `add` does."""
        if cta.lane == 0:
            add(cta.base + Int32(offset), x)

    @cute.jit
    def clear(self, cta: cutlass.Constexpr, records: Int64, ints: cutlass.Constexpr, used: Int32, old: Int32) -> None:
        """Zeroes the records [used, old), which the schedule before has left."""
        first, end = used * Int32(ints // 4) + cta.thread, old * Int32(ints // 4)
        for word in cutlass.range(first, end, THREADS):
            ptx.st_global_v4(records + Int64(word) * Int64(16), 0, [Int32(0) for _ in range(4)])
