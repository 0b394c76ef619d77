"""Faults of the Hopper kernel's main loop, masks and tile order."""

from __future__ import annotations

from tests.emulator.faults.fault import Table, chosen

LEAPS = chosen("persistent", "fa3 and (one_row or (leap and 128 and bfloat16))")
MIXED = chosen("persistent", "fa3 and ((long and causal and (400 or 300x100 or ragged)) or (long and q300))")
RAGGED = chosen("persistent", "fa3 and (test_long_batches and ragged)")
GATHER = chosen("persistent", "fa3 and (test_gathered_pages and (70x260 or slack))")
CUTS = chosen("persistent", "fa3 and (test_cut)")
SECTIONS = chosen("persistent", "fa3 and (test_batches_in_sections)")
SHARED = chosen("any_group", "share_tiles and adversarial and (sinks or split)")

RECOMPUTE: Table = {
    LEAPS: {
        "blocks/softmax.py": {
            "no sum triggers a recomputation": (
                "return 2.0**SLACK * self.layout.columns_per_thread",
                "return 2.0**100",
            ),
            "a lane's own maximum is taken for its row's": (
                "[self.layout.reduce(ptx.fmax, tree(ptx.fmax, self.layout.of_slot(s, slot))) for slot in self.slots]",
                "[tree(ptx.fmax, self.layout.of_slot(s, slot)) for slot in self.slots]",
            ),
        },
        "fa3/mainloop.py": {
            "each warp votes alone": (
                "needs_recompute = tma.any_of_warpgroup(lanes.warpgroup + VOTE_BARRIER, exceeds_slack)",
                "needs_recompute = cute.arch.vote_any_sync(exceeds_slack)",
            ),
            "both warpgroups vote at one barrier": (
                "needs_recompute = tma.any_of_warpgroup(lanes.warpgroup + VOTE_BARRIER, exceeds_slack)",
                "needs_recompute = tma.any_of_warpgroup(Int32(VOTE_BARRIER), exceeds_slack)",
            ),
            "K is released before the tile is recomputed": (
                "        rings.v.release(v, lanes.lane)\n        before = State(",
                "        rings.v.release(v, lanes.lane)\n"
                "        rings.k.release(k, lanes.lane)\n        before = State(",
            ),
            "the tile is recomputed without its mask": (
                "s = self.apply_score_mods_and_mask(mma, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, masked)",
                "s = self.apply_score_mods_and_mask(mma, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, False)",
            ),
            "old sums are not rescaled": (
                "total = [t * factor for t, factor in zip(total, rescale.factors, strict=True)]",
                "total = list(total)",
            ),
            "old outputs are not rescaled": (
                "return self.tile.output_layout.scale_rows(out, factors)",
                "return list(out)",
            ),
            "outputs of both rows are rescaled by the first row's factor": (
                "return self.tile.output_layout.scale_rows(out, factors)",
                "return [x * factors[0] for x in out]",
            ),
            "sums are not recomputed": (
                "p, sums = self.tile.probabilities(s), softmax.sums(s, softmax.zero_sums())",
                "p = self.tile.probabilities(s)",
            ),
            "probabilities are not recomputed": (
                "p, sums = self.tile.probabilities(s), softmax.sums(s, softmax.zero_sums())",
                "sums = softmax.sums(s, softmax.zero_sums())",
            ),
            "the anchor is not updated": ("shift = rescale.shift\n", "shift = list(shift)\n"),
            "V is released before it is read": (
                "        out = sm90.wgmma_wait(0, out, state.p)\n"
                "        rings.v.release(v, lanes.lane)\n        before",
                "        rings.v.release(v, lanes.lane)\n"
                "        out = sm90.wgmma_wait(0, out, state.p)\n        before",
            ),
        },
        "blocks/tma.py": {
            "the result of the vote is always 0": ('selp.s32 $0, 1, 0, q; }}"', 'selp.s32 $0, 0, 0, q; }}"'),
        },
    },
    chosen("persistent", "fa3 and (see_nothing_yet)"): {
        "blocks/softmax.py": {
            "rows without an anchor are always recomputed": (
                "return [ptx.fmin(x, Float32(LARGEST)) for x in shift]",
                "return list(shift)",
            ),
        },
    },
}

TILES: Table = {
    MIXED: {
        "fa3/mainloop.py": {
            "a warpgroup skips one tile too many": (
                "beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)), order.end - order.full_end)",
                "beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)) + Int32(1), order.end - order.full_end)",
            ),
            "tiles that a warpgroup skips are not released": (
                "                ring.wait_full(k)\n                ring.release(k, mma.lanes.lane)\n",
                "                ring.wait_full(k)\n",
            ),
        },
    },
    RAGGED: {
        "fa3/mainloop.py": {
            "rows of the next request are not cleared": (
                "if mma.order.end * cols > mma.kv_end:",
                "if mma.order.end * cols > mma.kv_end + 1000000:",
            ),
            "one row of the next request is not cleared": (
                "valid = mma.kv_end - (mma.order.end - 1) * cols\n                at",
                "valid = mma.kv_end - (mma.order.end - 1) * cols + Int32(1)\n                at",
            ),
            "cleared rows are not fenced": (
                "                tma.fence_async()\n                tma.named_sync(Int32(MMA_BARRIER), self.threads)",
                "                tma.named_sync(Int32(MMA_BARRIER), self.threads)",
            ),
            "warpgroups do not wait for rows that another one clears": (
                "                tma.fence_async()\n                tma.named_sync(Int32(MMA_BARRIER), self.threads)",
                "                tma.fence_async()",
            ),
        },
    },
    chosen("persistent", "fa3 and (test_long and packed)"): {
        "blocks/persistent.py": {
            "tiles with mask bits count as fully visible": ("return PackedMask.all_masked(order)", "return order"),
        },
        "blocks/masks.py": {
            "mask bits are those of the previous row": (
                "bit = Int64(token) * Int64(self.kv_len) + Int64(col)",
                "bit = Int64(ptx.maximum(token - 1, Int32(0))) * Int64(self.kv_len) + Int64(col)",
            ),
        },
    },
    chosen("persistent", "fa3 and (test_long and q300-k300)"): {
        "blocks/masks.py": {
            "the window is one key too long": (
                "token + self.band.left - first_col",
                "token + self.band.left - Int32(1) - first_col",
            ),
        },
    },
    chosen("persistent", "fa3 and (test_long and q300-k700)"): {
        "blocks/masks.py": {
            "a tile at the left edge counts as fully visible": (
                "full_begin = (ptx.maximum(zero, high + self.left) + Int32(cols - 1)) // cols",
                "full_begin = ptx.maximum(zero, high + self.left) // cols",
            ),
        },
    },
}

PERSISTENT: Table = {
    MIXED: {
        "blocks/tile_scheduler.py": {
            "a fetched tile is another CTA's": (
                "return ptx.shuffle_from(fetched, Int32(0)) + cute.arch.grid_dim()[0]",
                "return ptx.shuffle_from(fetched, Int32(0)) + cute.arch.grid_dim()[0] + Int32(1)",
            ),
            "the tile counter is not reset": ("                ptx.st_global_b32(self.counters, Int32(0))\n", ""),
            "the CTA counter is not reset": (
                "                ptx.st_global_b32(self.counters + Int64(4), Int32(0))\n",
                "",
            ),
            "the counters are reset one CTA too early": (
                "if stopped == cute.arch.grid_dim()[0] - 1:",
                "if stopped == cute.arch.grid_dim()[0] - 2:",
            ),
        },
        "fa3/mainloop.py": {
            "Q is released before its last product": (
                "                state = self.mainloop(rings, mma, k)\n"
                "                rings.q.release(q, lanes.lane)\n",
                "                rings.q.release(q, lanes.lane)\n"
                "                state = self.mainloop(rings, mma, k)\n",
            ),
        },
    },
    GATHER: {
        "blocks/tile_scheduler.py": {
            "a warpgroup reads the fetched tile before it is written": (
                "        tma.named_sync(Int32(self.barrier), self.threads)\n",
                "",
            ),
        },
    },
    SECTIONS: {
        "blocks/tile_scheduler.py": {
            "all sections take the heads of the first": (
                "return self.section * p.section_heads + self.within - self.number * p.section_heads",
                "return self.within - self.number * p.section_heads",
            ),
        },
    },
    chosen("persistent", "fa3 and (sections_of_single)"): {
        "blocks/tile_scheduler.py": {
            "all sections of a single request take the heads of the first": (
                "return self.section * p.section_heads + self.within - self.number * p.section_heads",
                "return self.within - self.number * p.section_heads",
            ),
        },
    },
    CUTS: {
        "blocks/tile_scheduler.py": {
            "the last split reads past the last key": (
                "kv_end=ptx.minimum(begin + p.split_tokens, p.kv_len),",
                "kv_end=begin + p.split_tokens,",
            ),
        },
        "blocks/persistent.py": {
            "all splits write the first split's partials": (
                "slab = Int64(work.partial) * Int64(p.qo_len) * Int64(p.num_qo_heads)",
                "slab = Int64(0) * Int64(p.qo_len) * Int64(p.num_qo_heads)",
            ),
        },
    },
    chosen("graph_combine", "fa3 and eager"): {
        "blocks/persistent.py": {
            "heads of a batch share one partial": (
                "slot = Int64(work.partial) * Int64(p.head_blocks) + Int64(work.head_block)",
                "slot = Int64(work.partial) * Int64(p.head_blocks)",
            ),
        },
        "blocks/tile_scheduler.py": {
            "records without work are processed": (
                "head_block=ptx.select(item.qo_len == Int32(0), Int32(NO_WORK), head_block),",
                "head_block=head_block,",
                "its tile has neither rows nor keys: nothing is written, and only time is lost",
            ),
        },
    },
}

SHARED_TILES: Table = {
    SHARED: {
        "fa3/kernel.py": {
            "unused rows of q are not cleared": ("if p.tile_rows < rows:", "if p.tile_rows < Int32(0):"),
            "only the first slot of q is cleared": (
                "cutlass.range(rings.q.stages * self.memory.qk_columns, unroll=1)",
                "cutlass.range(self.memory.qk_columns, unroll=1)",
            ),
            "zeros are not fenced against products": (
                "                    ptx.st_shared_v4(unused + at, 0, zeros)\n            tma.fence_async()\n",
                "                    ptx.st_shared_v4(unused + at, 0, zeros)\n",
            ),
        },
        "blocks/producer.py": {
            "copies of q are expected to fill unused rows": (
                "loads.expect(barrier, rings.q.slot_bytes - unused)",
                "loads.expect(barrier, rings.q.slot_bytes)",
            ),
        },
        "blocks/tile_scheduler.py": {
            "unused rows hold the next tile's": (
                "count = ptx.minimum(self.qo_len * p.group, end)",
                "count = self.qo_len * p.group",
            ),
        },
        "blocks/persistent.py": {
            "partial results leave room for unused rows": (
                "first = slot * Int64(p.tile_rows)",
                "first = slot * Int64(self.spec.tile.rows)",
            ),
        },
    },
    chosen("any_group", "single_requests"): {
        "blocks/tile_scheduler.py": {
            "tiles of a single request begin after unused rows": (
                "first_row=(p.last_block - position.number) * p.tile_rows,",
                "first_row=(p.last_block - position.number) * ((p.tile_rows + 63) // 64 * 64),",
            ),
        },
    },
}
