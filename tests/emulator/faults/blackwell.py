"""Faults of the Blackwell kernel: products, softmax, hand-overs in tensor memory, epilogue, loads."""

from __future__ import annotations

from tests.emulator.faults.fault import Table, chosen

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

PRODUCTS: Table = {
    TILES: {
        "blocks/sm100.py": {
            "the keep flag of the first product of P and V is inverted": (
                "setp.ne.s32 keep, $3, 0",
                "setp.eq.s32 keep, $3, 0",
            ),
        },
        "fa4/mma_warp.py": {
            "outputs of several kv tiles are added to those of the work item before": (
                "self.first_output(context, state, i, step > first[i] + 1)",
                "self.first_output(context, state, i, Boolean(True))",
            ),
            "products do not wait for P": (
                "        ring.wait_released(s)\n        sm100.fence_after_sync()\n",
                "        sm100.fence_after_sync()\n",
            ),
            "no fence between the wait for P and its product": (
                "        ring.wait_released(s)\n        sm100.fence_after_sync()\n",
                "        ring.wait_released(s)\n",
            ),
            "O is published before its last product": (
                (
                    "                    state = self.first_output(context, state, i, "
                    "steps.order.total > steps.first[i] "
                    "+ 1)\n"
                    '                    state = state._replace(**{f"o{i}": self.publish_output(context, state.o(i), '
                    "i)})\n"
                ),
                (
                    '                    state = state._replace(**{f"o{i}": self.publish_output(context, state.o(i), '
                    "i)})\n"
                    "                    state = self.next_output(context, state, i, "
                    "steps.order.total > steps.first[i] "
                    "+ 1)\n"
                ),
            ),
        },
        "fa4/work.py": {
            "a query tile skips one kv tile too many": (
                "first.append(ptx.select(idle, order.total, beyond))",
                "first.append(ptx.select(idle, order.total, ptx.minimum(beyond + 1, order.total - 1)))",
            ),
        },
        "fa4/kernel.py": {
            "tensor memory is freed before the last warp has read it": (
                "        sm100.fence_before_sync()\n        self.cta.sync()\n        sm100.fence_after_sync()\n",
                "        sm100.fence_before_sync()\n        sm100.fence_after_sync()\n",
            ),
        },
    },
    ITEMS: {
        "fa4/mma_warp.py": {
            "outputs of one kv tile are added to those of the work item before": (
                "self.first_output(context, state, i, steps.order.total > steps.first[i] + 1)",
                "self.first_output(context, state, i, Boolean(True))",
            ),
        },
    },
    RINGS: {
        "fa4/mma_warp.py": {
            "K is released before the second query tile's product": (
                (
                    "        self.scores(context, state.k, state.s1, 1)\n"
                    "        return state._replace(k=self.release_k(context, state.k), v=v)"
                ),
                (
                    "        k = self.release_k(context, state.k)\n"
                    "        self.scores(context, state.k, state.s1, 1)\n"
                    "        return state._replace(k=k, v=v)"
                ),
            ),
            "V is released before the second query tile's product": (
                "        state = self.next_output(context, state, 1, True)\n"
                "        v = self.release_v(context, state.v)\n",
                "        v = self.release_v(context, state.v)\n"
                "        state = self.next_output(context, state, 1, True)\n",
            ),
        },
    },
    OVERLAP: {
        "fa4/mma_warp.py": {
            "Q is released before the products that read it": (
                "            state = self.mainloop(context, state)\n"
                "            self.commit(context, rings.q.empty(q))\n",
                "            self.commit(context, rings.q.empty(q))\n"
                "            state = self.mainloop(context, state)\n",
            ),
            "products do not wait for O to be stored": (
                '        context.ring("o", i).wait_empty(state.o(i))\n        return',
                "        return",
            ),
        },
    },
    chosen("fa4_adversarial", "test_few_kv_tiles and causal and (127 or 129)"): {
        "fa4/work.py": {
            "a query tile skips kv tiles that a mask lets it see in part": (
                "end = (ptx.maximum(stop, Int32(0)) + Int32(tile.cols - 1)) // tile.cols",
                "end = ptx.maximum(stop, Int32(0)) // tile.cols",
            ),
        },
    },
    EARLY: {
        "fa4/work.py": {
            "a query tile without visible keys takes part": (
                "idle = cutlass.or_(end <= order.begin, rows.exists(row) == cutlass.Boolean(False))",
                "idle = rows.exists(row) == cutlass.Boolean(False)",
                "its rows see no key of the kv tile: their sums are 0, and zeros are stored all the same",
            ),
        },
    },
}

SOFTMAX: Table = {
    TILES: {
        "fa4/softmax_warps.py": {
            "P is released before its stores are complete": (
                "        sm100.wait_stores()\n        sm100.fence_before_sync()\n",
                "        sm100.fence_before_sync()\n",
            ),
            "no fence between P and its release": (
                "        sm100.wait_stores()\n        sm100.fence_before_sync()\n",
                "        sm100.wait_stores()\n",
            ),
            "P is stored one chunk late": (
                "sm100.store_columns(context.s, i, p[i : i + 32])",
                "sm100.store_columns(context.s, i + 16, p[i : i + 32])",
            ),
            "sums are published before they are written": (
                (
                    "        ptx.st_shared_v2_f32(ring.address(stats) + lanes.lane_row * 8, 0, [state.shift, "
                    "state.total])\n"
                    "        ptx.sync_warp()\n"
                    "        if lanes.lane == 0:\n"
                    "            tma.barrier_arrive(ring.full(stats))\n"
                ),
                (
                    "        if lanes.lane == 0:\n"
                    "            tma.barrier_arrive(ring.full(stats))\n"
                    "        ptx.st_shared_v2_f32(ring.address(stats) + lanes.lane_row * 8, 0, [state.shift, "
                    "state.total])\n"
                ),
            ),
        },
        "fa4/anchored.py": {
            "the first kv tile rescales the outputs of the work item before": (
                "columns = ptx.select(first, Int32(0), Int32(self.tile.output_columns))",
                "columns = Int32(self.tile.output_columns)",
            ),
        },
    },
    ITEMS: {
        "fa4/softmax_warps.py": {
            "sums overwrite those that the epilogue has not read": ("        ring.wait_empty(stats)\n", ""),
        },
    },
    chosen("fa4_adversarial", "test_few_kv_tiles and none and (128 or 256)"): {
        "fa4/softmax_warps.py": {
            "the first kv tile without a mask has no anchors": (
                "masked = ptx.minimum(ptx.maximum(order.masked, first + 1), order.total)",
                "masked = ptx.minimum(ptx.maximum(order.masked, first), order.total)",
            ),
        },
    },
    RISES: {
        "fa4/anchored.py": {
            "no sum raises the anchors": (
                "return 2.0**context.softmax.slack * self.spec.tile.cols",
                'return float("inf")',
            ),
            "sums of tiles before are not rescaled": ("return new, total * factor", "return new, total"),
            "outputs of tiles before are not rescaled": (
                "columns = ptx.select(first, Int32(0), Int32(self.tile.output_columns))",
                "columns = Int32(0)",
            ),
        },
    },
    LANES: {
        "fa4/anchored.py": {
            "each lane decides alone whether its anchor is raised": (
                "raises = cute.arch.vote_any_sync(level > limit)",
                "raises = level > limit",
            ),
        },
    },
    HIDDEN: {
        "fa4/anchored.py": {
            "rows without an anchor are not kept finite": (
                "shifts = softmax.finite([shift]) if masked else [shift]",
                "shifts = [shift]",
            ),
        },
    },
    chosen("persistent", "fa4 and test_scores_that_leap and 64"): {
        "fa4/anchored.py": {
            "a row's anchor is raised to that of a chunk's first half": (
                "for i in cutlass.range_constexpr(0, CHUNK_COLUMNS, 2):\n                high",
                "for i in cutlass.range_constexpr(0, CHUNK_COLUMNS // 2, 2):\n                high",
            ),
        },
    },
    chosen("fa4_adversarial", "test_few_kv_tiles and causal and (127 or 129)"): {
        "fa4/anchored.py": {
            "a chunk that one row sees whole is not masked for its warp": (
                "if cute.arch.vote_any_sync(word != Int32(0)):",
                "if cute.arch.vote_all_sync(word != Int32(0)):",
            ),
        },
        "fa4/parts/row_masks.py": {
            "hidden columns begin one key late": (
                "return columns_from(self.band.stop(self.token) - kv_start)",
                "return columns_from(self.band.stop(self.token) - kv_start + 1)",
            ),
        },
    },
    chosen("fa4_adversarial", "test_windows and (31 or 127)"): {
        "fa4/parts/row_masks.py": {
            "the window is one key too long (Blackwell)": (
                "columns_before(self.token + self.band.left - kv_start)",
                "columns_before(self.token + self.band.left - kv_start - 1)",
            ),
        },
    },
    ("tests/kernels/test_exp2.py",): {
        "fa4/parts/exp2.py": {
            "a coefficient of the polynomial for exp2 is off by a hundredth": (
                "mov.b64 c, 0x3f317afd3f317afd",
                "mov.b64 c, 0x3f337afd3f337afd",
            ),
        },
    },
}

OUTPUTS: Table = {
    OVERLAP: {
        "fa4/epilogue_warps.py": {
            "O is released before it is loaded": (
                "            store.write_columns(first, self.load(tile, first, count), factor)\n"
                "        self.release(tile)\n",
                (
                    "            if first == 0:\n                self.release(tile)\n"
                    "            store.write_columns(first, self.load(tile, first, count), factor)\n"
                ),
            ),
            "no fence between the loads of O and its release": (
                "            sm100.fence_before_sync()\n            ptx.sync_warp()\n",
                "            ptx.sync_warp()\n",
            ),
        },
    },
    TILES: {
        "fa4/epilogue_warps.py": {
            "loads of O are not waited for": (
                "values = sm100.wait_loads(sm100.load_columns(tile.address, first, loaded))[:count]",
                "values = sm100.load_columns(tile.address, first, loaded)[:count]",
            ),
            "the epilogue does not wait for O": ("            tile.ring.wait_full(output)\n", ""),
        },
    },
    EARLY: {
        "fa4/epilogue_warps.py": {
            "O is read where no product wrote it": (
                "        if tile.active:\n            loaded",
                "        if Boolean(True):\n            loaded",
            ),
        },
    },
    STAGED: {
        "fa4/epilogue_warps.py": {
            "rows of the next request are stored by TMA": (
                "exists(self.first_row + Int32(QUERY_TILE_ROWS - 1))",
                "exists(self.first_row)",
            ),
            "the CTA leaves before its staged outputs have been read": (
                "            staging.drain()\n",
                "            pass\n",
            ),
        },
        "fa4/parts/output_staging.py": {
            "staged outputs are not fenced before TMA reads them": (
                "        tma.fence_async()\n        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
                "        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
            ),
            "outputs are stored before all threads have staged theirs": (
                "        tma.fence_async()\n        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
                "        tma.fence_async()\n",
            ),
            "the staging buffer is reused before it has been read": (
                "            tma.store_wait_read()\n",
                "            pass\n",
            ),
            "other threads reuse the staging buffer before it has been read": (
                "        self.drain()\n        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)\n",
                "        self.drain()\n",
            ),
        },
    },
}

LOADS: Table = {
    ENDS: {
        "fa4/tail_warp.py": {
            "one row past the keys is not cleared (Blackwell)": (
                "work.kv_end - (order.end - 1) * cols, lane)",
                "work.kv_end - (order.end - 1) * cols + 1, lane)",
            ),
            "cleared rows of V are not fenced": ("        tma.fence_async()\n", "        pass\n"),
            "rows are cleared in the slot of another tile": (
                "return PipelineState((v.index_phase + tiles) % period)",
                "return PipelineState((v.index_phase + 1) % period)",
            ),
        },
        "fa4/mma_warp.py": {
            "products do not wait for cleared rows": (
                '                    rings.by_name["tail"].wait_full(tail)\n',
                "",
            ),
        },
    },
}

PAIRS: Table = {
    WIDE: {
        "blocks/sm100.py": {
            "commits of a pair arrive in the leader alone": ("mov.b16 m, 3;", "mov.b16 m, 1;"),
        },
        "fa4/pair.py": {
            "the leader expects the bytes of one CTA": ("Int32(CTAS * num_bytes)", "Int32(num_bytes)"),
        },
    },
    PAIR_OF_TWO: {
        "fa4/pair.py": {
            "the second CTA of a pair leaves before the last commits arrive there": (
                "            ring.wait_empty(state)\n            state = ring.next(state)\n",
                "            state = ring.next(state)\n",
            ),
        },
    },
}

BLACKWELL = (PRODUCTS, SOFTMAX, OUTPUTS, LOADS, PAIRS)
