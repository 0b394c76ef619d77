"""Faults of the Hopper kernel's main loop, masks and tile order."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

LEAPS = chosen("persistent", "fa3 and (one_row or (leap and 128 and bfloat16))")
MIXED = chosen("persistent", "fa3 and ((long and causal and (400 or 300x100 or ragged)) or (long and q300))")
RAGGED = chosen("persistent", "fa3 and (test_long_batches and ragged)")
GATHER = chosen("persistent", "fa3 and (test_gathered_pages and (70x260 or slack))")
CUTS = chosen("persistent", "fa3 and (test_cut)")
SECTIONS = chosen("persistent", "fa3 and (test_batches_in_sections)")
SHARED = chosen("any_group", "share_tiles and schedule2 and (sinks or split)")

RECOMPUTE = (
    Fault(
        "no sum triggers a recomputation",
        "blocks/softmax.py",
        "return 2.0**SLACK * self.layout.columns_per_thread",
        "return 2.0**100",
        LEAPS,
    ),
    Fault(
        "rows without an anchor are always recomputed",
        "blocks/softmax.py",
        "return [ptx.fmin(x, Float32(LARGEST)) for x in shift]",
        "return list(shift)",
        chosen("persistent", "fa3 and (see_nothing_yet)"),
    ),
    Fault(
        "each warp votes alone",
        "fa3/mainloop.py",
        "needs_recompute = tma.any_of_warpgroup(lanes.warpgroup + VOTE_BARRIER, exceeds_slack)",
        "needs_recompute = cute.arch.vote_any_sync(exceeds_slack)",
        LEAPS,
    ),
    Fault(
        "both warpgroups vote at one barrier",
        "fa3/mainloop.py",
        "needs_recompute = tma.any_of_warpgroup(lanes.warpgroup + VOTE_BARRIER, exceeds_slack)",
        "needs_recompute = tma.any_of_warpgroup(Int32(VOTE_BARRIER), exceeds_slack)",
        LEAPS,
    ),
    Fault(
        "the result of the vote is always 0",
        "blocks/tma.py",
        'selp.s32 $0, 1, 0, q; }}"',
        'selp.s32 $0, 0, 0, q; }}"',
        LEAPS,
    ),
    Fault(
        "K is released before the tile is recomputed",
        "fa3/mainloop.py",
        "        rings.v.release(v, lanes.lane)\n        before = State(",
        "        rings.v.release(v, lanes.lane)\n        rings.k.release(k, lanes.lane)\n        before = State(",
        LEAPS,
    ),
    Fault(
        "the tile is recomputed without its mask",
        "fa3/mainloop.py",
        "s = self.apply_score_mods_and_mask(mma, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, masked)",
        "s = self.apply_score_mods_and_mask(mma, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, False)",
        LEAPS,
    ),
    Fault(
        "old sums are not rescaled",
        "fa3/mainloop.py",
        "total = [t * factor for t, factor in zip(total, rescale.factors, strict=True)]",
        "total = list(total)",
        LEAPS,
    ),
    Fault(
        "old outputs are not rescaled",
        "fa3/mainloop.py",
        "return self.tile.output_layout.scale_rows(out, factors)",
        "return list(out)",
        LEAPS,
    ),
    Fault(
        "outputs of both rows are rescaled by the first row's factor",
        "fa3/mainloop.py",
        "return self.tile.output_layout.scale_rows(out, factors)",
        "return [x * factors[0] for x in out]",
        LEAPS,
    ),
    Fault(
        "sums are not recomputed",
        "fa3/mainloop.py",
        "p, sums = self.tile.probabilities(s), softmax.sums(s, softmax.zero_sums())",
        "p = self.tile.probabilities(s)",
        LEAPS,
    ),
    Fault(
        "probabilities are not recomputed",
        "fa3/mainloop.py",
        "p, sums = self.tile.probabilities(s), softmax.sums(s, softmax.zero_sums())",
        "sums = softmax.sums(s, softmax.zero_sums())",
        LEAPS,
    ),
    Fault("the anchor is not updated", "fa3/mainloop.py", "shift = rescale.shift\n", "shift = list(shift)\n", LEAPS),
    Fault(
        "a lane's own maximum is taken for its row's",
        "blocks/softmax.py",
        "[self.layout.reduce(ptx.fmax, tree(ptx.fmax, self.layout.of_slot(s, slot))) for slot in self.slots]",
        "[tree(ptx.fmax, self.layout.of_slot(s, slot)) for slot in self.slots]",
        LEAPS,
    ),
    Fault(
        "V is released before it is read",
        "fa3/mainloop.py",
        "        out = sm90.wgmma_wait(0, out, state.p)\n        rings.v.release(v, lanes.lane)\n        before",
        "        rings.v.release(v, lanes.lane)\n        out = sm90.wgmma_wait(0, out, state.p)\n        before",
        LEAPS,
    ),
)

TILES = (
    Fault(
        "a warpgroup skips one tile too many",
        "fa3/mainloop.py",
        "beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)), order.end - order.full_end)",
        "beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)) + Int32(1), order.end - order.full_end)",
        MIXED,
    ),
    Fault(
        "tiles that a warpgroup skips are not released",
        "fa3/mainloop.py",
        "                ring.wait_full(k)\n                ring.release(k, mma.lanes.lane)\n",
        "                ring.wait_full(k)\n",
        MIXED,
    ),
    Fault(
        "rows of the next request are not cleared",
        "fa3/mainloop.py",
        "if mma.order.end * cols > mma.kv_end:",
        "if mma.order.end * cols > mma.kv_end + 1000000:",
        RAGGED,
    ),
    Fault(
        "one row of the next request is not cleared",
        "fa3/mainloop.py",
        "valid = mma.kv_end - (mma.order.end - 1) * cols\n                at",
        "valid = mma.kv_end - (mma.order.end - 1) * cols + Int32(1)\n                at",
        RAGGED,
    ),
    Fault(
        "cleared rows are not fenced",
        "fa3/mainloop.py",
        "                tma.fence_async()\n                tma.named_sync(Int32(MMA_BARRIER), self.threads)",
        "                tma.named_sync(Int32(MMA_BARRIER), self.threads)",
        RAGGED,
    ),
    Fault(
        "warpgroups do not wait for rows that another one clears",
        "fa3/mainloop.py",
        "                tma.fence_async()\n                tma.named_sync(Int32(MMA_BARRIER), self.threads)",
        "                tma.fence_async()",
        RAGGED,
    ),
    Fault(
        "tiles with mask bits count as fully visible",
        "blocks/persistent.py",
        "return PackedMask.all_masked(order)",
        "return order",
        chosen("persistent", "fa3 and (test_long and packed)"),
    ),
    Fault(
        "mask bits are those of the previous row",
        "blocks/masks.py",
        "bit = Int64(token) * Int64(self.kv_len) + Int64(col)",
        "bit = Int64(ptx.maximum(token - 1, Int32(0))) * Int64(self.kv_len) + Int64(col)",
        chosen("persistent", "fa3 and (test_long and packed)"),
    ),
    Fault(
        "the window is one key too long",
        "blocks/masks.py",
        "token + self.band.left - first_col",
        "token + self.band.left - Int32(1) - first_col",
        chosen("persistent", "fa3 and (test_long and q300-k300)"),
    ),
    Fault(
        "a tile at the left edge counts as fully visible",
        "blocks/masks.py",
        "full_begin = (ptx.maximum(zero, high + self.left) + Int32(cols - 1)) // cols",
        "full_begin = ptx.maximum(zero, high + self.left) // cols",
        chosen("persistent", "fa3 and (test_long and q300-k700)"),
    ),
)

PERSISTENT = (
    Fault(
        "a fetched tile is another CTA's",
        "blocks/tile_scheduler.py",
        "return ptx.shuffle_from(fetched, Int32(0)) + cute.arch.grid_dim()[0]",
        "return ptx.shuffle_from(fetched, Int32(0)) + cute.arch.grid_dim()[0] + Int32(1)",
        MIXED,
    ),
    Fault(
        "the tile counter is not reset",
        "blocks/tile_scheduler.py",
        "                ptx.st_global_b32(self.counters, Int32(0))\n",
        "",
        MIXED,
    ),
    Fault(
        "the CTA counter is not reset",
        "blocks/tile_scheduler.py",
        "                ptx.st_global_b32(self.counters + Int64(4), Int32(0))\n",
        "",
        MIXED,
    ),
    Fault(
        "the counters are reset one CTA too early",
        "blocks/tile_scheduler.py",
        "if stopped == cute.arch.grid_dim()[0] - 1:",
        "if stopped == cute.arch.grid_dim()[0] - 2:",
        MIXED,
    ),
    Fault(
        "a warpgroup reads the fetched tile before it is written",
        "blocks/tile_scheduler.py",
        "        tma.named_sync(Int32(self.barrier), self.threads)\n",
        "",
        GATHER,
    ),
    Fault(
        "all sections take the heads of the first",
        "blocks/tile_scheduler.py",
        "return self.section * p.section_heads + self.within - self.number * p.section_heads",
        "return self.within - self.number * p.section_heads",
        SECTIONS,
    ),
    Fault(
        "all sections of a single request take the heads of the first",
        "blocks/tile_scheduler.py",
        "return self.section * p.section_heads + self.within - self.number * p.section_heads",
        "return self.within - self.number * p.section_heads",
        chosen("persistent", "fa3 and (sections_of_single)"),
    ),
    Fault(
        "the last split reads past the last key",
        "blocks/tile_scheduler.py",
        "kv_end=ptx.minimum(begin + p.split_tokens, p.kv_len),",
        "kv_end=begin + p.split_tokens,",
        CUTS,
    ),
    Fault(
        "all splits write the first split's partials",
        "blocks/persistent.py",
        "slab = Int64(work.partial) * Int64(p.qo_len) * Int64(p.num_qo_heads)",
        "slab = Int64(0) * Int64(p.qo_len) * Int64(p.num_qo_heads)",
        CUTS,
    ),
    Fault(
        "heads of a batch share one partial",
        "blocks/persistent.py",
        "slot = Int64(work.partial) * Int64(p.head_blocks) + Int64(work.head_block)",
        "slot = Int64(work.partial) * Int64(p.head_blocks)",
        chosen("graph_combine", "fa3 and eager"),
    ),
    Fault(
        "records without work are processed",
        "blocks/tile_scheduler.py",
        "head_block=ptx.select(item.qo_len == Int32(0), Int32(NO_WORK), head_block),",
        "head_block=head_block,",
        chosen("graph_combine", "fa3 and eager"),
        "its tile has neither rows nor keys: nothing is written, and only time is lost",
    ),
    Fault(
        "Q is released before its last product",
        "fa3/mainloop.py",
        "                state = self.mainloop(rings, mma, k)\n                rings.q.release(q, lanes.lane)\n",
        "                rings.q.release(q, lanes.lane)\n                state = self.mainloop(rings, mma, k)\n",
        MIXED,
    ),
)

SHARED_TILES = (
    Fault(
        "unused rows of q are not cleared",
        "fa3/kernel.py",
        "if p.tile_rows < rows:",
        "if p.tile_rows < Int32(0):",
        SHARED,
    ),
    Fault(
        "only the first slot of q is cleared",
        "fa3/kernel.py",
        "cutlass.range(rings.q.stages * self.memory.qk_columns, unroll=1)",
        "cutlass.range(self.memory.qk_columns, unroll=1)",
        SHARED,
    ),
    Fault(
        "zeros are not fenced against products",
        "fa3/kernel.py",
        "                    ptx.st_shared_v4(unused + at, 0, zeros)\n            tma.fence_async()\n",
        "                    ptx.st_shared_v4(unused + at, 0, zeros)\n",
        SHARED,
    ),
    Fault(
        "copies of q are expected to fill unused rows",
        "blocks/producer.py",
        "loads.expect(barrier, rings.q.slot_bytes - unused)",
        "loads.expect(barrier, rings.q.slot_bytes)",
        SHARED,
    ),
    Fault(
        "unused rows hold the next tile's",
        "blocks/tile_scheduler.py",
        "count = ptx.minimum(self.qo_len * p.group, end)",
        "count = self.qo_len * p.group",
        SHARED,
    ),
    Fault(
        "partial results leave room for unused rows",
        "blocks/persistent.py",
        "first = slot * Int64(p.tile_rows)",
        "first = slot * Int64(self.spec.tile.rows)",
        SHARED,
    ),
    Fault(
        "tiles of a single request begin after unused rows",
        "blocks/tile_scheduler.py",
        "first_row=(p.last_block - position.number) * p.tile_rows,",
        "first_row=(p.last_block - position.number) * ((p.tile_rows + 63) // 64 * 64),",
        chosen("any_group", "single_requests"),
    ),
)
