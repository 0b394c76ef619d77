"""Faults in latent attention on Hopper: barriers, anchors, partition, merge, pages, scales."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

EDGES = chosen("mla", "test_cases and sm_90a and edges")
LONG = chosen("mla", "test_cases and sm_90a and long")
WIDE = chosen("mla", "test_cases and sm_90a and heads")
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
        "        ring.wait_empty(state)\n        target, loaded = ",
        "        target, loaded = ",
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
    Fault(
        "converted numbers are not fenced",
        "mla/hopper/producer.py",
        "        tma.fence_async()\n        tma.barrier_arrive(ring.full(state))\n",
        "        tma.barrier_arrive(ring.full(state))\n",
        NARROW,
    ),
)

PRODUCTS = (
    Fault(
        "scores do not wait for the second half",
        "mla/hopper/warpgroups.py",
        "for index in range(len(HALVES)):",
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
        "both warpgroups announce P at one barrier",
        "mla/hopper/warpgroups.py",
        "P_BARRIER + (1 - place.warpgroup), BOTH)\n        running",
        "P_BARRIER + place.warpgroup, BOTH)\n        running",
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
        "a warpgroup writes the other's columns",
        "mla/hopper/kernel.py",
        "columns = Int64(place.warpgroup * (place.dims * 2))",
        "columns = Int64((1 - place.warpgroup) * (place.dims * 2))",
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
        "the last tile of the other warpgroup is left out",
        "mla/hopper/warpgroups.py",
        "left = (split.end - tile) & 1",
        "left = (split.end - tile) & 0",
        EDGES,
    ),
    Fault(
        "the last token of a tile is masked with the next tile",
        "mla/parts/softmax.py",
        "if start + place.spec.cols > self.common:",
        "if start + place.spec.cols > self.common + 1:",
        EDGES,
    ),
    Fault(
        "tokens are masked by the tile's number",
        "mla/hopper/warpgroups.py",
        "mask.apply(self.oriented(s), tile * place.spec.cols)",
        "mask.apply(self.oriented(s), tile)",
        EDGES,
    ),
    Fault(
        "hidden scores have no sign under a scale of zero",
        "mla/hopper/warpgroups.py",
        "ptx.fmax(ptx.magnitude(self.scale), Float32(SMALLEST))",
        "ptx.magnitude(self.scale)",
        SCALES,
    ),
    Fault(
        "a negative scale leaves the order of scores",
        "mla/hopper/warpgroups.py",
        "s = [Float32(0.0) - x for x in s]",
        "s = list(s)",
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
        "sums of latent attention are not rescaled",
        "mla/hopper/warpgroups.py",
        "total = [x * factor for x, factor in zip(running.total, factors, strict=True)]",
        "total = list(running.total)",
        RISING,
    ),
    Fault(
        "each warpgroup reads its own anchors",
        "mla/hopper/warpgroups.py",
        "self.read_column(self.memory.shifts, 1 - place.warpgroup)",
        "self.read_column(self.memory.shifts, place.warpgroup)",
        EDGES,
    ),
    Fault(
        "sums of the other warpgroup are left out",
        "mla/hopper/warpgroups.py",
        "return [a + b for a, b in zip(mine, others, strict=True)]",
        "return mine",
        EDGES,
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
        "requests of unequal lengths are cut like equal ones",
        "mla/hopper/partition.py",
        "longest * p.batch == total",
        "longest * p.batch >= total",
        SHARES,
    ),
    Fault(
        "requests of equal lengths are cut like unequal ones",
        "mla/hopper/partition.py",
        "if size <= share.size + SWITCH:",
        "if size < share.size:",
        SHARES,
    ),
    Fault(
        "equal parts are rounded down",
        "mla/hopper/partition.py",
        "part = ptx.divide(segment + parts - 1, parts)",
        "part = ptx.divide(segment, parts) - 1",
        SHARES,
    ),
    Fault(
        "the last whole segments belong to no share",
        "mla/hopper/partition.py",
        "whole = ptx.divide(size + segment - 1, segment) * segment",
        "whole = ptx.divide(size, segment) * segment",
        LONG,
    ),
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
        "groups are merged from the first CTAs' states",
        "mla/hopper/merge.py",
        "Parts(Int32(0), Int32(GROUP), groups)",
        "Parts(Int32(0), Int32(1), groups)",
        GROUPS,
    ),
    Fault(
        "the last CTA of a group takes it for the last of all",
        "mla/hopper/merge.py",
        "Parts(begin, Int32(1), size), self.shares <= GROUP",
        "Parts(begin, Int32(1), size), self.shares > 0",
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
    Fault(
        "warps read the ticket before it is there",
        "mla/hopper/merge.py",
        "        self.sync()\n        return ptx.ld_shared_b32",
        "        return ptx.ld_shared_b32",
        LONG,
    ),
    Fault(
        "two states of a CTA have one place",
        "mla/hopper/merge.py",
        "self.cta(index) * 2 + ptx.select(index == 0, Int32(1), Int32(0))",
        "self.cta(index) * 2",
        EDGES,
    ),
    Fault(
        "all parts are stored as whole segments",
        "mla/hopper/segments.py",
        "whole=ptx.select(split.whole, Int32(1), Int32(0))",
        "whole=Int32(1)",
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
        "rows keep their number in the tile within a page",
        "mla/hopper/producer.py",
        "slot = token - self.page_size.quotient(token) * p.page_size",
        "slot = token - token // 64 * 64",
        EDGES,
    ),
    Fault(
        "latent rows behind the last token are copied",
        "mla/hopper/producer.py",
        "size = ptx.select(source.exists, Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        EDGES,
    ),
    Fault(
        "narrow rows behind the last token are loaded",
        "mla/hopper/producer.py",
        "isa.load_if(source.exists, address, offset, 2)",
        "isa.load_if(Boolean(True), address, offset, 2)",
        NARROW,
    ),
    Fault(
        "query rows behind the last are copied",
        "mla/hopper/producer.py",
        "size = ptx.select(rows.exists(row), Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        EDGES,
    ),
    Fault(
        "rotated columns have the scale of latent ones",
        "mla/hopper/producer.py",
        "                    pairs = [self.scaled(pair) for pair in pairs]\n",
        "                    pass\n",
        NARROW,
    ),
    Fault(
        "the scale of latent columns is ignored",
        "mla/hopper/kernel.py",
        "scale = p.scale * device_scale(p.scale_ptr)",
        "scale = p.rope_scale * device_scale(p.scale_ptr)",
        NARROW,
    ),
    Fault(
        "a scale on the device is ignored",
        "mla/hopper/kernel.py",
        "scale = p.scale * device_scale(p.scale_ptr)",
        "scale = p.scale",
        SCALES,
    ),
)

LATENT_FAULTS = (*RINGS, *PRODUCTS, *ANCHORS, *SHARING, *PAGES_AND_SCALES)
