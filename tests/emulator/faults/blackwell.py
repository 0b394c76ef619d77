"""Faults of the Blackwell kernel: products, softmax, hand-overs in tensor memory, epilogue, loads."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

TILES = chosen("fa4_adversarial", "test_few_kv_tiles and (129 or 257)")
RINGS = chosen("fa4_adversarial", "test_every_ring_wraps and 64-adversarial")
ITEMS = chosen("fa4_adversarial", "test_items_on_one_cta and each")
ENDS = chosen("fa4_adversarial", "test_items_on_one_cta and (within or after)")
OVERLAP = chosen("fa4_adversarial", "test_outputs_are_stored_under_the_next_products and 64-adversarial")
HIDDEN = chosen("fa4_adversarial", "test_hidden_tiles and row and delayed")
EARLY = chosen("fa4_adversarial", "test_causal_rows_before_the_first_key")
RISES = chosen("fa4_adversarial", "test_scores_rise_in_every_chunk and 40 and delayed")
LANES = chosen("fa4_adversarial", "test_a_rise_in_one_lane and 60 and (37 or 199)")
WIDE = chosen("fa4_adversarial", "test_items_on_one_cta and wide")
PAIR_OF_TWO = chosen("fa4_adversarial", "test_items_on_one_cta and within")
STAGED = chosen("fa4_pages", "test_ways_of_outputs and 128x128")

PRODUCTS = (
    Fault(
        "the keep flag of the first product of P and V is inverted",
        "blocks/sm100.py",
        "setp.ne.s32 keep, $3, 0",
        "setp.eq.s32 keep, $3, 0",
        TILES,
    ),
    Fault(
        "outputs of several kv tiles are added to those of the work item before",
        "fa4/mma_warp.py",
        "self.first_output(context, state, i, step > first[i] + 1)",
        "self.first_output(context, state, i, Boolean(True))",
        TILES,
    ),
    Fault(
        "outputs of one kv tile are added to those of the work item before",
        "fa4/mma_warp.py",
        "self.first_output(context, state, i, steps.order.total > steps.first[i] + 1)",
        "self.first_output(context, state, i, Boolean(True))",
        ITEMS,
    ),
    Fault(
        "K is released before the second query tile's product",
        "fa4/mma_warp.py",
        "        self.scores(context, state.k, state.s1, 1)\n"
        "        return state._replace(k=self.release_k(context, state.k), v=v)",
        "        k = self.release_k(context, state.k)\n"
        "        self.scores(context, state.k, state.s1, 1)\n"
        "        return state._replace(k=k, v=v)",
        RINGS,
    ),
    Fault(
        "V is released before the second query tile's product",
        "fa4/mma_warp.py",
        "        state = self.next_output(context, state, 1, True)\n        v = self.release_v(context, state.v)\n",
        "        v = self.release_v(context, state.v)\n        state = self.next_output(context, state, 1, True)\n",
        RINGS,
    ),
    Fault(
        "Q is released before the products that read it",
        "fa4/mma_warp.py",
        "            state = self.mainloop(context, state)\n            self.commit(context, rings.q.empty(q))\n",
        "            self.commit(context, rings.q.empty(q))\n            state = self.mainloop(context, state)\n",
        OVERLAP,
    ),
    Fault(
        "products do not wait for O to be stored",
        "fa4/mma_warp.py",
        '        context.ring("o", i).wait_empty(state.o(i))\n        return',
        "        return",
        OVERLAP,
    ),
    Fault(
        "products do not wait for P",
        "fa4/mma_warp.py",
        "        ring.wait_released(s)\n        sm100.fence_after_sync()\n",
        "        sm100.fence_after_sync()\n",
        TILES,
    ),
    Fault(
        "no fence between the wait for P and its product",
        "fa4/mma_warp.py",
        "        ring.wait_released(s)\n        sm100.fence_after_sync()\n",
        "        ring.wait_released(s)\n",
        TILES,
    ),
    Fault(
        "O is published before its last product",
        "fa4/mma_warp.py",
        "                    state = self.first_output(context, state, i, steps.order.total > steps.first[i] + 1)\n"
        '                    state = state._replace(**{f"o{i}": self.publish_output(context, state.o(i), i)})\n',
        '                    state = state._replace(**{f"o{i}": self.publish_output(context, state.o(i), i)})\n'
        "                    state = self.next_output(context, state, i, steps.order.total > steps.first[i] + 1)\n",
        TILES,
    ),
    Fault(
        "a query tile skips one kv tile too many",
        "fa4/work.py",
        "first.append(ptx.select(idle, order.total, beyond))",
        "first.append(ptx.select(idle, order.total, ptx.minimum(beyond + 1, order.total - 1)))",
        TILES,
    ),
    Fault(
        "a query tile skips kv tiles that a mask lets it see in part",
        "fa4/work.py",
        "end = (ptx.maximum(stop, Int32(0)) + Int32(tile.cols - 1)) // tile.cols",
        "end = ptx.maximum(stop, Int32(0)) // tile.cols",
        chosen("fa4_adversarial", "test_few_kv_tiles and causal and (127 or 129)"),
    ),
    Fault(
        "a query tile without visible keys takes part",
        "fa4/work.py",
        "idle = cutlass.or_(end <= order.begin, rows.exists(row) == cutlass.Boolean(False))",
        "idle = rows.exists(row) == cutlass.Boolean(False)",
        EARLY,
        "its rows see no key of the kv tile: their sums are 0, and zeros are stored all the same",
    ),
    Fault(
        "tensor memory is freed before the last warp has read it",
        "fa4/kernel.py",
        "        sm100.fence_before_sync()\n        self.cta.sync()\n        sm100.fence_after_sync()\n",
        "        sm100.fence_before_sync()\n        sm100.fence_after_sync()\n",
        TILES,
    ),
)

SOFTMAX = (
    Fault(
        "P is released before its stores are complete",
        "fa4/softmax_warps.py",
        "        sm100.wait_stores()\n        sm100.fence_before_sync()\n",
        "        sm100.fence_before_sync()\n",
        TILES,
    ),
    Fault(
        "no fence between P and its release",
        "fa4/softmax_warps.py",
        "        sm100.wait_stores()\n        sm100.fence_before_sync()\n",
        "        sm100.wait_stores()\n",
        TILES,
    ),
    Fault(
        "P is stored one chunk late",
        "fa4/softmax_warps.py",
        "sm100.store_columns(context.s, i, p[i : i + 32])",
        "sm100.store_columns(context.s, i + 16, p[i : i + 32])",
        TILES,
    ),
    Fault(
        "sums are published before they are written",
        "fa4/softmax_warps.py",
        "        ptx.st_shared_v2_f32(ring.address(state.stats) + lanes.lane_row * 8, 0, [state.shift, state.total])\n"
        "        ptx.sync_warp()\n"
        "        if lanes.lane == 0:\n"
        "            tma.barrier_arrive(ring.full(state.stats))\n",
        "        if lanes.lane == 0:\n"
        "            tma.barrier_arrive(ring.full(state.stats))\n"
        "        ptx.st_shared_v2_f32(ring.address(state.stats) + lanes.lane_row * 8, 0, [state.shift, state.total])\n",
        TILES,
    ),
    Fault(
        "sums overwrite those that the epilogue has not read",
        "fa4/softmax_warps.py",
        "        ring.wait_empty(state.stats)\n",
        "",
        ITEMS,
    ),
    Fault(
        "the first kv tile without a mask has no anchors",
        "fa4/softmax_warps.py",
        "masked = ptx.minimum(ptx.maximum(order.masked, first + 1), order.total)",
        "masked = ptx.minimum(ptx.maximum(order.masked, first), order.total)",
        chosen("fa4_adversarial", "test_few_kv_tiles and none and (128 or 256)"),
    ),
    Fault(
        "no sum raises the anchors",
        "fa4/anchored.py",
        "return 2.0**context.softmax.slack * self.spec.tile.cols",
        'return float("inf")',
        RISES,
    ),
    Fault(
        "each lane decides alone whether its anchor is raised",
        "fa4/anchored.py",
        "raises = cute.arch.vote_any_sync(level > limit)",
        "raises = level > limit",
        LANES,
    ),
    Fault(
        "sums of tiles before are not rescaled",
        "fa4/anchored.py",
        "return new, total * factor",
        "return new, total",
        RISES,
    ),
    Fault(
        "outputs of tiles before are not rescaled",
        "fa4/anchored.py",
        "columns = ptx.select(first, Int32(0), Int32(self.tile.output_columns))",
        "columns = Int32(0)",
        RISES,
    ),
    Fault(
        "the first kv tile rescales the outputs of the work item before",
        "fa4/anchored.py",
        "columns = ptx.select(first, Int32(0), Int32(self.tile.output_columns))",
        "columns = Int32(self.tile.output_columns)",
        TILES,
    ),
    Fault(
        "rows without an anchor are not kept finite",
        "fa4/anchored.py",
        "shifts = softmax.finite([shift]) if masked else [shift]",
        "shifts = [shift]",
        HIDDEN,
    ),
    Fault(
        "a row's anchor is raised to that of a chunk's first half",
        "fa4/anchored.py",
        "for i in cutlass.range_constexpr(0, CHUNK_COLUMNS, 2):\n                high",
        "for i in cutlass.range_constexpr(0, CHUNK_COLUMNS // 2, 2):\n                high",
        chosen("persistent", "fa4 and test_scores_that_leap and 64"),
    ),
    Fault(
        "a chunk that one row sees whole is not masked for its warp",
        "fa4/anchored.py",
        "if cute.arch.vote_any_sync(word != Int32(0)):",
        "if cute.arch.vote_all_sync(word != Int32(0)):",
        chosen("fa4_adversarial", "test_few_kv_tiles and causal and (127 or 129)"),
    ),
    Fault(
        "hidden columns begin one key late",
        "fa4/parts/row_masks.py",
        "return columns_from(self.band.stop(self.token) - kv_start)",
        "return columns_from(self.band.stop(self.token) - kv_start + 1)",
        chosen("fa4_adversarial", "test_few_kv_tiles and causal and (127 or 129)"),
    ),
    Fault(
        "the window is one key too long (Blackwell)",
        "fa4/parts/row_masks.py",
        "columns_before(self.token + self.band.left - kv_start)",
        "columns_before(self.token + self.band.left - kv_start - 1)",
        chosen("fa4_adversarial", "test_windows and (31 or 127)"),
    ),
    Fault(
        "a coefficient of the polynomial for exp2 is off by a hundredth",
        "fa4/parts/exp2.py",
        "mov.b64 c, 0x3f317afd3f317afd",
        "mov.b64 c, 0x3f337afd3f337afd",
        ("tests/kernels/test_exp2.py",),
    ),
)

OUTPUTS = (
    Fault(
        "O is released before it is loaded",
        "fa4/epilogue_warps.py",
        "            store.write_columns(first, self.load(tile, first, count), factor)\n        self.release(tile)\n",
        "            if first == 0:\n                self.release(tile)\n"
        "            store.write_columns(first, self.load(tile, first, count), factor)\n",
        OVERLAP,
    ),
    Fault(
        "loads of O are not waited for",
        "fa4/epilogue_warps.py",
        "values = sm100.wait_loads(sm100.load_columns(tile.address, first, loaded))[:count]",
        "values = sm100.load_columns(tile.address, first, loaded)[:count]",
        TILES,
    ),
    Fault(
        "no fence between the loads of O and its release",
        "fa4/epilogue_warps.py",
        "            sm100.fence_before_sync()\n            ptx.sync_warp()\n",
        "            ptx.sync_warp()\n",
        OVERLAP,
    ),
    Fault(
        "the epilogue does not wait for O",
        "fa4/epilogue_warps.py",
        "            tile.ring.wait_full(output)\n",
        "",
        TILES,
    ),
    Fault(
        "O is read where no product wrote it",
        "fa4/epilogue_warps.py",
        "        if tile.active:\n            loaded",
        "        if Boolean(True):\n            loaded",
        EARLY,
    ),
    Fault(
        "rows of the next request are stored by TMA",
        "fa4/epilogue_warps.py",
        "exists(self.first_row + Int32(QUERY_TILE_ROWS - 1))",
        "exists(self.first_row)",
        STAGED,
    ),
    Fault(
        "staged outputs are not fenced before TMA reads them",
        "fa4/parts/output_staging.py",
        "        tma.fence_async()\n        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
        "        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
        STAGED,
    ),
    Fault(
        "outputs are stored before all threads have staged theirs",
        "fa4/parts/output_staging.py",
        "        tma.fence_async()\n        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
        "        tma.fence_async()\n",
        STAGED,
    ),
    Fault(
        "the staging buffer is reused before it has been read",
        "fa4/parts/output_staging.py",
        "            tma.store_wait_read()\n",
        "            pass\n",
        STAGED,
    ),
    Fault(
        "the CTA leaves before its staged outputs have been read",
        "fa4/epilogue_warps.py",
        "            staging.drain()\n",
        "            pass\n",
        STAGED,
    ),
    Fault(
        "other threads reuse the staging buffer before it has been read",
        "fa4/parts/output_staging.py",
        "        self.drain()\n        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
        "        self.drain()\n",
        STAGED,
    ),
)

LOADS = (
    Fault(
        "one row past the keys is not cleared (Blackwell)",
        "fa4/tail_warp.py",
        "work.kv_end - (order.end - 1) * cols, lane)",
        "work.kv_end - (order.end - 1) * cols + 1, lane)",
        ENDS,
    ),
    Fault(
        "cleared rows of V are not fenced",
        "fa4/tail_warp.py",
        "        tma.fence_async()\n",
        "        pass\n",
        ENDS,
    ),
    Fault(
        "products do not wait for cleared rows",
        "fa4/mma_warp.py",
        '                    rings.by_name["tail"].wait_full(tail)\n',
        "",
        ENDS,
    ),
    Fault(
        "rows are cleared in the slot of another tile",
        "fa4/tail_warp.py",
        "return PipelineState((v.index_phase + tiles) % period)",
        "return PipelineState((v.index_phase + 1) % period)",
        ENDS,
    ),
)

PAIRS = (
    Fault(
        "commits of a pair arrive in the leader alone",
        "blocks/sm100.py",
        "mov.b16 m, 3;",
        "mov.b16 m, 1;",
        WIDE,
    ),
    Fault(
        "the leader expects the bytes of one CTA",
        "fa4/pair.py",
        "Int32(CTAS * num_bytes)",
        "Int32(num_bytes)",
        WIDE,
    ),
    Fault(
        "the second CTA of a pair leaves before the last commits arrive there",
        "fa4/pair.py",
        "            ring.wait_empty(state)\n            state = ring.next(state)\n",
        "            state = ring.next(state)\n",
        PAIR_OF_TWO,  # of one query tile, O's commit is the last
    ),
)

BLACKWELL = (*PRODUCTS, *SOFTMAX, *OUTPUTS, *LOADS, *PAIRS)
