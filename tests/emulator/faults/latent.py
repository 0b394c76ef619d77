"""Faults in latent attention on Hopper: barriers, anchors, partition, merge, pages, scales."""

from __future__ import annotations

from tests.emulator.faults.fault import Table, chosen

EDGES = chosen("mla", "test_cases and sm_90a and edges")
LONG = chosen("mla", "test_cases and sm_90a and long")
NARROW = chosen("mla", "test_cases and sm_90a and e4m3")
RISING = chosen("mla", "test_cases and sm_90a and rise")
ORDER = chosen("mla", "test_schedules and (edges or long)")
NARROW_ORDER = chosen("mla", "test_schedules and e4m3")
GROUPS = chosen("mla", "test_groups_of_ctas")
SHARES = chosen("mla", "test_where_requests_are_cut")
SCALES = chosen("mla", "test_scales_on_the_device and sm_90a")

RINGS: Table = {
    ORDER: {
        "mla/hopper/rings.py": {
            "one MMA warpgroup releases the query rows for both": (
                "self.q.initialise(PRODUCERS + 1, 2 * WARPS)",
                "self.q.initialise(PRODUCERS + 1, WARPS)",
            ),
            "query rows are complete without the record": (
                "self.q.initialise(PRODUCERS + 1, 2 * WARPS)",
                "self.q.initialise(PRODUCERS, 2 * WARPS)",
            ),
            "half of a warpgroup releases a half of a tile": (
                "self.half(index).initialise(PRODUCERS, WARPS)",
                "self.half(index).initialise(PRODUCERS, WARPS // 2)",
            ),
            "barriers of the two halves overlap": (
                "first + index * memory.half_barrier_bytes",
                "first + index * memory.half_barrier_bytes // 2",
            ),
        },
        "mla/hopper/producer.py": {
            "query rows are overwritten while scores need them": ("        self.rings.q.wait_empty(q)\n", ""),
            "a half of a tile is overwritten while it is read": (
                "        ring.wait_empty(state)\n"
                "        target = self.target(ring.address(state))\n        for i, first",
                "        target = self.target(ring.address(state))\n        for i, first",
            ),
            "copies of a half do not arrive": (
                (
                    "            self.copy_row(target, first, (source.latent, source.rotated), size, columns)\n"
                    "        ptx.cp_async_arrive(ring.full(state))\n"
                ),
                (
                    "            self.copy_row(target, first, (source.latent, source.rotated), size, columns)\n"
                    "        tma.barrier_arrive(ring.full(state))\n"
                ),
            ),
        },
        "mla/hopper/kernel.py": {
            "the second segment has the phase of the first": (
                "                q = rings.q.next(q)\n            segment = ",
                "            segment = ",
            ),
        },
    },
    EDGES: {
        "mla/hopper/producer.py": {
            "the record does not arrive": ("            tma.barrier_arrive(self.rings.q.full(q))\n\n", "\n"),
        },
    },
    NARROW_ORDER: {
        "mla/hopper/producer.py": {
            "converted numbers overwrite a half that is read": (
                "        ring.wait_empty(state)\n        target, loaded, scales = ",
                "        target, loaded, scales = ",
            ),
        },
    },
}

PRODUCTS: Table = {
    ORDER: {
        "mla/hopper/warpgroups.py": {
            "scores do not wait for the second half": ("for index in range(HALVES):", "for index in range(1):"),
            "a half is released before its product is done": (
                (
                    "        running = running._replace(out=sm90.wgmma_wait(1, running.out))\n"
                    "        self.half.release(state, self.place.lane)\n"
                ),
                (
                    "        self.half.release(state, self.place.lane)\n"
                    "        running = running._replace(out=sm90.wgmma_wait(1, running.out))\n"
                ),
            ),
        },
    },
    EDGES: {
        "mla/hopper/warpgroups.py": {
            "copied tiles are not fenced": (
                "        tma.fence_async()  # once for both: it takes longer than the second wait\n",
                "",
            ),
            "a warpgroup adds the other's columns": (
                "columns = place.warpgroup * (place.dims * 2 // LINE",
                "columns = (1 - place.warpgroup) * (place.dims * 2 // LINE",
            ),
        },
        "mla/parts/softmax.py": {
            "the last token of a tile is masked with the next tile": (
                "if start + place.spec.cols > self.common:",
                "if start + place.spec.cols > self.common + 1:",
            ),
        },
    },
    LONG: {
        "mla/hopper/warpgroups.py": {
            "P is read before it is there": (
                "        tma.named_sync(P_BARRIER + (1 - place.warpgroup), BOTH)\n",
                "        tma.named_arrive(P_BARRIER + (1 - place.warpgroup), BOTH)\n",
            ),
            "P is not announced": ("        tma.named_arrive(P_BARRIER + place.warpgroup, BOTH)\n", ""),
            "P is not fenced": ("        tma.fence_async()\n        tma.named_arrive(", "        tma.named_arrive("),
            "a step takes one slot": ("state = ring.next(ring.next(state))", "state = ring.next(state)"),
        },
    },
    SCALES: {
        "mla/hopper/warpgroups.py": {
            "hidden scores have no sign under a scale of zero": (
                "ptx.fmax(ptx.magnitude(self.scale), Float32(SMALLEST))",
                "ptx.magnitude(self.scale)",
            ),
        },
    },
}

ANCHORS: Table = {
    RISING: {
        "mla/hopper/warpgroups.py": {
            "a warpgroup does not follow the other's anchors": (
                "            running = self.rescaled(running, shift, moved)\n",
                "            running = running._replace(shift=shift)\n",
            ),
            "own anchors move without a rescaling": (
                "            running = self.rescaled(running, raised.shift, exceeded)\n",
                "            running = running._replace(shift=raised.shift)\n",
            ),
            "latent outputs are not rescaled": (
                "Running(self.place.outputs.scale_rows(running.out, factors), shift, total)",
                "Running(running.out, shift, total)",
            ),
        },
    },
    EDGES: {  # one CTA has segments of one tile, one after the other: nothing else keeps the warpgroups in step
        "mla/hopper/warpgroups.py": {
            "sums are overwritten before both have read them": (
                "        tma.named_sync(Int32(TOTALS_BARRIER), BOTH)  # before either writes again\n",
                "",
            ),
        },
    },
}

SHARING: Table = {
    SHARES: {
        "mla/hopper/segments.py": {
            "a segment that ends with a share reaches into the next": (
                "ptx.divide(segment.start + request.tiles - 1, share.size)",
                "ptx.divide(segment.start + request.tiles, share.size)",
            ),
        },
    },
    LONG: {
        "mla/hopper/merge.py": {
            "the last state of a segment is left out": (
                "isa.all_of([i < parts.count, self.rows.exists(row)])",
                "isa.all_of([i < parts.count - 1, self.rows.exists(row)])",
            ),
            "counters of merged segments are not reset": (
                "                ptx.st_global_b32(counter, Int32(0))\n",
                "                pass\n",
            ),
            "a CTA is counted before its warps have stored their states": (
                "        self.sync()\n        if cute.arch.thread_idx()[0] == 0:\n            arrived",
                "        if cute.arch.thread_idx()[0] == 0:\n            arrived",
            ),
        },
    },
    GROUPS: {
        "mla/hopper/merge.py": {
            "the last group of CTAs is left out": (
                "groups = (self.shares + (GROUP - 1)) // GROUP",
                "groups = self.shares // GROUP",
            ),
        },
    },
}

PAGES_AND_SCALES: Table = {
    EDGES: {
        "mla/hopper/producer.py": {
            "a thread's rows have the page of its first": (
                "page = self.page_size.quotient(self.token(tile, first))",
                "page = self.page_size.quotient(self.token(tile, 0))",
            ),
            "latent rows behind the last token are copied": (
                "size = ptx.select(source.exists, Int32(CHUNK), Int32(0))",
                "size = Int32(CHUNK)",
            ),
        },
    },
    LONG: {
        "mla/hopper/producer.py": {
            "tiles have the pages of the tile before": (
                "self.tile(segment, split, index + 1)\n            for half",
                "self.tile(segment, split, index)\n            for half",
            ),
        },
    },
    NARROW: {
        "mla/hopper/producer.py": {
            "rotated columns have the scale of latent ones": (
                "            return scaled(spec.dtype, pairs, self.rotated_factor)\n",
                "            return pairs\n",
            ),
        },
        "mla/hopper/kernel.py": {
            "the scale of latent columns is ignored": (
                "scale = p.scale * device_scale(p.scale_ptr)",
                "scale = p.rope_scale * device_scale(p.scale_ptr)",
            ),
        },
    },
}

LATENT_FAULTS = (RINGS, PRODUCTS, ANCHORS, SHARING, PAGES_AND_SCALES)
