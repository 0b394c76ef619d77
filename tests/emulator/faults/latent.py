"""Faults in latent attention on Hopper: barriers, anchors, partition, merge, pages, scales."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

EDGES = chosen("mla", "test_cases and sm_90a and edges")
LONG = chosen("mla", "test_cases and sm_90a and long")
NARROW = chosen("mla", "test_cases and sm_90a and e4m3")
RISING = chosen("mla", "test_cases and sm_90a and rise")
ORDER = chosen("mla", "test_schedules and (edges or long)")
NARROW_ORDER = chosen("mla", "test_schedules and e4m3")
GROUPS = chosen("mla", "test_groups_of_ctas")
SHARES = chosen("mla", "test_where_requests_are_cut")
SCALES = chosen("mla", "test_scales_on_the_device and sm_90a")

RINGS = (
    Fault(
        "one MMA warpgroup releases the query rows for both",
        "mla/hopper/rings.py",
        "self.q.initialise(PRODUCERS + 1, 2 * WARPS)",
        "self.q.initialise(PRODUCERS + 1, WARPS)",
        ORDER,
    ),
    Fault(
        "query rows are complete without the record",
        "mla/hopper/rings.py",
        "self.q.initialise(PRODUCERS + 1, 2 * WARPS)",
        "self.q.initialise(PRODUCERS, 2 * WARPS)",
        ORDER,
    ),
    Fault(
        "half of a warpgroup releases a half of a tile",
        "mla/hopper/rings.py",
        "self.half(index).initialise(PRODUCERS, WARPS)",
        "self.half(index).initialise(PRODUCERS, WARPS // 2)",
        ORDER,
    ),
    Fault(
        "barriers of the two halves overlap",
        "mla/hopper/rings.py",
        "first + index * memory.half_barrier_bytes",
        "first + index * memory.half_barrier_bytes // 2",
        ORDER,
    ),
    Fault(
        "query rows are overwritten while scores need them",
        "mla/hopper/producer.py",
        "        self.rings.q.wait_empty(q)\n",
        "",
        ORDER,
    ),
    Fault(
        "the record does not arrive",
        "mla/hopper/producer.py",
        "            tma.barrier_arrive(self.rings.q.full(q))\n\n",
        "\n",
        EDGES,
    ),
    Fault(
        "the second segment has the phase of the first",
        "mla/hopper/kernel.py",
        "                q = rings.q.next(q)\n            segment = ",
        "            segment = ",
        ORDER,
    ),
    Fault(
        "a half of a tile is overwritten while it is read",
        "mla/hopper/producer.py",
        "        ring.wait_empty(state)\n        target = self.target(ring.address(state))\n        for i, first",
        "        target = self.target(ring.address(state))\n        for i, first",
        ORDER,
    ),
    Fault(
        "converted numbers overwrite a half that is read",
        "mla/hopper/producer.py",
        "        ring.wait_empty(state)\n        target, loaded, scales = ",
        "        target, loaded, scales = ",
        NARROW_ORDER,
    ),
    Fault(
        "copies of a half do not arrive",
        "mla/hopper/producer.py",
        "            self.copy_row(target, first, (source.latent, source.rotated), size, columns)\n"
        "        ptx.cp_async_arrive(ring.full(state))\n",
        "            self.copy_row(target, first, (source.latent, source.rotated), size, columns)\n"
        "        tma.barrier_arrive(ring.full(state))\n",
        ORDER,
    ),
)

PRODUCTS = (
    Fault(
        "scores do not wait for the second half",
        "mla/hopper/warpgroups.py",
        "for index in range(HALVES):",
        "for index in range(1):",
        ORDER,
    ),
    Fault(
        "copied tiles are not fenced",
        "mla/hopper/warpgroups.py",
        "        tma.fence_async()  # once for both: it takes longer than the second wait\n",
        "",
        EDGES,
    ),
    Fault(
        "P is read before it is there",
        "mla/hopper/warpgroups.py",
        "        tma.named_sync(P_BARRIER + (1 - place.warpgroup), BOTH)\n",
        "        tma.named_arrive(P_BARRIER + (1 - place.warpgroup), BOTH)\n",
        LONG,
    ),
    Fault(
        "P is not announced",
        "mla/hopper/warpgroups.py",
        "        tma.named_arrive(P_BARRIER + place.warpgroup, BOTH)\n",
        "",
        LONG,
    ),
    Fault(
        "P is not fenced",
        "mla/hopper/warpgroups.py",
        "        tma.fence_async()\n        tma.named_arrive(",
        "        tma.named_arrive(",
        LONG,
    ),
    Fault(
        "a half is released before its product is done",
        "mla/hopper/warpgroups.py",
        "        running = running._replace(out=sm90.wgmma_wait(1, running.out))\n"
        "        self.half.release(state, self.place.lane)\n",
        "        self.half.release(state, self.place.lane)\n"
        "        running = running._replace(out=sm90.wgmma_wait(1, running.out))\n",
        ORDER,
    ),
    Fault(
        "a warpgroup adds the other's columns",
        "mla/hopper/warpgroups.py",
        "columns = place.warpgroup * (place.dims * 2 // LINE",
        "columns = (1 - place.warpgroup) * (place.dims * 2 // LINE",
        EDGES,
    ),
    Fault(
        "a step takes one slot",
        "mla/hopper/warpgroups.py",
        "state = ring.next(ring.next(state))",
        "state = ring.next(state)",
        LONG,
    ),
    Fault(
        "the last token of a tile is masked with the next tile",
        "mla/parts/softmax.py",
        "if start + place.spec.cols > self.common:",
        "if start + place.spec.cols > self.common + 1:",
        EDGES,
    ),
    Fault(
        "hidden scores have no sign under a scale of zero",
        "mla/hopper/warpgroups.py",
        "ptx.fmax(ptx.magnitude(self.scale), Float32(SMALLEST))",
        "ptx.magnitude(self.scale)",
        SCALES,
    ),
)

ANCHORS = (
    Fault(
        "a warpgroup does not follow the other's anchors",
        "mla/hopper/warpgroups.py",
        "            running = self.rescaled(running, shift, moved)\n",
        "            running = running._replace(shift=shift)\n",
        RISING,
    ),
    Fault(
        "own anchors move without a rescaling",
        "mla/hopper/warpgroups.py",
        "            running = self.rescaled(running, raised.shift, exceeded)\n",
        "            running = running._replace(shift=raised.shift)\n",
        RISING,
    ),
    Fault(
        "latent outputs are not rescaled",
        "mla/hopper/warpgroups.py",
        "Running(self.place.outputs.scale_rows(running.out, factors), shift, total)",
        "Running(running.out, shift, total)",
        RISING,
    ),
    Fault(
        "sums are overwritten before both have read them",
        "mla/hopper/warpgroups.py",
        "        tma.named_sync(Int32(TOTALS_BARRIER), BOTH)  # before either writes again\n",
        "",
        ORDER,
    ),
)

SHARING = (
    Fault(
        "a segment that ends with a share reaches into the next",
        "mla/hopper/segments.py",
        "ptx.divide(segment.start + request.tiles - 1, share.size)",
        "ptx.divide(segment.start + request.tiles, share.size)",
        SHARES,
    ),
    Fault(
        "the last state of a segment is left out",
        "mla/hopper/merge.py",
        "isa.all_of([i < parts.count, self.rows.exists(row)])",
        "isa.all_of([i < parts.count - 1, self.rows.exists(row)])",
        LONG,
    ),
    Fault(
        "the last group of CTAs is left out",
        "mla/hopper/merge.py",
        "groups = (self.shares + (GROUP - 1)) // GROUP",
        "groups = self.shares // GROUP",
        GROUPS,
    ),
    Fault(
        "counters of merged segments are not reset",
        "mla/hopper/merge.py",
        "                ptx.st_global_b32(counter, Int32(0))\n",
        "                pass\n",
        LONG,
    ),
    Fault(
        "a CTA is counted before its warps have stored their states",
        "mla/hopper/merge.py",
        "        self.sync()\n        if cute.arch.thread_idx()[0] == 0:\n            arrived",
        "        if cute.arch.thread_idx()[0] == 0:\n            arrived",
        LONG,
    ),
)

PAGES_AND_SCALES = (
    Fault(
        "a thread's rows have the page of its first",
        "mla/hopper/producer.py",
        "page = self.page_size.quotient(self.token(tile, first))",
        "page = self.page_size.quotient(self.token(tile, 0))",
        EDGES,
    ),
    Fault(
        "tiles have the pages of the tile before",
        "mla/hopper/producer.py",
        "self.tile(segment, split, index + 1)\n            for half",
        "self.tile(segment, split, index)\n            for half",
        LONG,
    ),
    Fault(
        "latent rows behind the last token are copied",
        "mla/hopper/producer.py",
        "size = ptx.select(source.exists, Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        EDGES,
    ),
    Fault(
        "rotated columns have the scale of latent ones",
        "mla/hopper/producer.py",
        "            return scaled(spec.dtype, pairs, self.rotated_factor)\n",
        "            return pairs\n",
        NARROW,
    ),
    Fault(
        "the scale of latent columns is ignored",
        "mla/hopper/kernel.py",
        "scale = p.scale * device_scale(p.scale_ptr)",
        "scale = p.rope_scale * device_scale(p.scale_ptr)",
        NARROW,
    ),
)

LATENT_FAULTS = (*RINGS, *PRODUCTS, *ANCHORS, *SHARING, *PAGES_AND_SCALES)
