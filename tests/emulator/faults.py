"""Faults of our kernels: a line of their sources said otherwise, and the tests that must notice.

`inject` puts them into a copy of the project and runs those tests there. Where a fault breaks nothing that can be
seen, `equivalent` says why.
"""

from __future__ import annotations

from dataclasses import dataclass

FA3, FP8, XQA = (f"tests/emulator/test_{name}.py" for name in ("fa3", "fa3_fp8", "xqa"))
COMBINE = "tests/emulator/test_graph_combine.py"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in a file of `cute_attn/kernels`, becomes `new`. `tests`: arguments of pytest."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""


def chosen(file: str, words: str) -> tuple[str, ...]:
    return file, "-k", words


LEAPS = chosen(FA3, "one_row or (leap and 128 and bfloat16)")
MIXED = chosen(FA3, "(long and causal and (400 or 300x100 or ragged)) or (long and q300)")
RAGGED = chosen(FA3, "test_long_batches and ragged")
BOXES = chosen(FA3, "test_long_batches and 130x500")
GATHER = chosen(FA3, "test_gathered_pages and (70x260 or slack)")
CUTS = chosen(FA3, "test_cut")
SECTIONS = chosen(FA3, "test_batches_in_sections")

HINDSIGHT = (
    Fault(
        "any sum is low enough",
        "blocks/softmax.py",
        "limit = Float32(2.0**SLACK * len(self.columns(0)))",
        "limit = Float32(2.0**100)",
        LEAPS,
    ),
    Fault(
        "rows without an anchor are always done again",
        "blocks/softmax.py",
        "return [ptx.fmin(x, Float32(LARGEST)) for x in shift]",
        "return list(shift)",
        chosen(FA3, "see_nothing_yet"),
    ),
    Fault(
        "every warp votes for itself",
        "fa3.py",
        "again = sm90.any_of_group(lanes.group + FIRST_VOTE, too_high)",
        "again = cute.arch.vote_any_sync(too_high)",
        LEAPS,
    ),
    Fault(
        "both groups vote at one barrier",
        "fa3.py",
        "again = sm90.any_of_group(lanes.group + FIRST_VOTE, too_high)",
        "again = sm90.any_of_group(Int32(FIRST_VOTE), too_high)",
        LEAPS,
    ),
    Fault(
        "nobody is heard",
        "blocks/sm90.py",
        'selp.s32 $0, 1, 0, q; }}"',
        'selp.s32 $0, 0, 0, q; }}"',
        LEAPS,
    ),
    Fault(
        "K is given up before the tile is done again",
        "fa3.py",
        "        shared.v.release(v, lanes.lane)\n        before = State(",
        "        shared.v.release(v, lanes.lane)\n        shared.k.release(k, lanes.lane)\n        before = State(",
        LEAPS,
    ),
    Fault(
        "the tile is done again without its mask",
        "fa3.py",
        "s = self.seen(math, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, masked)",
        "s = self.seen(math, sm90.wgmma_wait(0, self.tile.scores(q, k)), kv_tile, False)",
        LEAPS,
    ),
    Fault(
        "old sums keep their scale",
        "fa3.py",
        "total = [t * factor for t, factor in zip(total, risen.factors, strict=True)]",
        "total = list(total)",
        LEAPS,
    ),
    Fault(
        "old outputs keep their scale",
        "fa3.py",
        "out = [x * risen.factors[i % 4 // 2] for i, x in enumerate(out)]",
        "out = list(out)",
        LEAPS,
    ),
    Fault(
        "outputs of both rows take the first row's factor",
        "fa3.py",
        "out = [x * risen.factors[i % 4 // 2] for i, x in enumerate(out)]",
        "out = [x * risen.factors[0] for i, x in enumerate(out)]",
        LEAPS,
    ),
    Fault(
        "sums of the first attempt stay",
        "fa3.py",
        "p, sums = self.tile.probabilities(s), softmax.sums(s, [Float32(0.0) for _ in range(2)])",
        "p = self.tile.probabilities(s)",
        LEAPS,
    ),
    Fault(
        "probabilities of the first attempt stay",
        "fa3.py",
        "p, sums = self.tile.probabilities(s), softmax.sums(s, [Float32(0.0) for _ in range(2)])",
        "sums = softmax.sums(s, [Float32(0.0) for _ in range(2)])",
        LEAPS,
    ),
    Fault("the old anchor stays", "fa3.py", "shift = risen.shift\n", "shift = list(shift)\n", LEAPS),
    Fault(
        "a lane's own maximum is its row's",
        "blocks/softmax.py",
        "return [reduce_quad(ptx.fmax, tree(ptx.fmax, [s[i] for i in self.columns(slot)])) for slot in self.slots]",
        "return [tree(ptx.fmax, [s[i] for i in self.columns(slot)]) for slot in self.slots]",
        LEAPS,
    ),
    Fault(
        "V is given up before it is read",
        "fa3.py",
        "        out = sm90.wgmma_wait(0, out, state.p)\n        shared.v.release(v, lanes.lane)\n        before",
        "        shared.v.release(v, lanes.lane)\n        out = sm90.wgmma_wait(0, out, state.p)\n        before",
        LEAPS,
    ),
)

TILES = (
    Fault(
        "a group passes over a tile too many",
        "fa3.py",
        "beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)), order.end - order.full_end)",
        "beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)) + Int32(1), order.end - order.full_end)",
        MIXED,
    ),
    Fault(
        "tiles that a group passes over are not given up",
        "fa3.py",
        "                ring.wait_full(k)\n                ring.release(k, math.lanes.lane)\n",
        "                ring.wait_full(k)\n",
        MIXED,
    ),
    Fault(
        "rows of the next request keep their values",
        "fa3.py",
        "if math.order.end * cols > math.kv_end:",
        "if math.order.end * cols > math.kv_end + 1000000:",
        RAGGED,
    ),
    Fault(
        "one row of the next request keeps its values",
        "fa3.py",
        "valid = math.kv_end - (math.order.end - 1) * cols\n                at",
        "valid = math.kv_end - (math.order.end - 1) * cols + Int32(1)\n                at",
        RAGGED,
    ),
    Fault(
        "cleared rows are not fenced",
        "fa3.py",
        "                sm90.fence_async()\n                sm90.named_sync(Int32(MATH_BARRIER), self.math_threads)",
        "                sm90.named_sync(Int32(MATH_BARRIER), self.math_threads)",
        RAGGED,
    ),
    Fault(
        "groups do not wait for rows that another clears",
        "fa3.py",
        "                sm90.fence_async()\n                sm90.named_sync(Int32(MATH_BARRIER), self.math_threads)",
        "                sm90.fence_async()",
        RAGGED,
    ),
    Fault(
        "tiles under mask bits count as seen in full",
        "fa3.py",
        'return PackedMask.all_masked(order) if self.spec.mask == "packed" else order',
        "return order",
        chosen(FA3, "test_long and packed"),
    ),
    Fault(
        "the mask's bits belong to the row before",
        "blocks/masks.py",
        "bit = Int64(token) * Int64(self.kv_len) + Int64(col)",
        "bit = Int64(ptx.maximum(token - 1, Int32(0))) * Int64(self.kv_len) + Int64(col)",
        chosen(FA3, "test_long and packed"),
    ),
    Fault(
        "the window is a key too long",
        "blocks/masks.py",
        "token + self.band.left - first_col",
        "token + self.band.left - Int32(1) - first_col",
        chosen(FA3, "test_long and q300-k300"),
    ),
    Fault(
        "a tile at the left edge counts as seen in full",
        "blocks/masks.py",
        "full_begin = (ptx.maximum(zero, high + self.left) + Int32(cols - 1)) // cols",
        "full_begin = ptx.maximum(zero, high + self.left) // cols",
        chosen(FA3, "test_long and q300-k700"),
    ),
)

PERSISTENT = (
    Fault(
        "a drawn tile is another CTA's",
        "blocks/persistent.py",
        "return ptx.shuffle_from(drawn, Int32(0)) + cute.arch.grid_dim()[0]",
        "return ptx.shuffle_from(drawn, Int32(0)) + cute.arch.grid_dim()[0] + Int32(1)",
        MIXED,
    ),
    Fault(
        "the counter of tiles stays",
        "blocks/persistent.py",
        "                sm90.st_global_u32(self.counters, Int32(0))\n",
        "",
        MIXED,
    ),
    Fault(
        "the counter of CTAs stays",
        "blocks/persistent.py",
        "                sm90.st_global_u32(self.counters + Int64(4), Int32(0))\n",
        "",
        MIXED,
    ),
    Fault(
        "a CTA too few is waited for",
        "blocks/persistent.py",
        "if stopped == cute.arch.grid_dim()[0] - 1:",
        "if stopped == cute.arch.grid_dim()[0] - 2:",
        MIXED,
    ),
    Fault(
        "a warpgroup reads the drawn number before it is there",
        "blocks/persistent.py",
        "        sm90.named_sync(Int32(self.barrier), 128)\n",
        "",
        GATHER,
    ),
    Fault(
        "all sections are the first",
        "blocks/persistent.py",
        "head_block = section * p.section_heads + within - number * p.section_heads",
        "head_block = within - number * p.section_heads",
        SECTIONS,
    ),
    Fault(
        "a single request's sections are all the first",
        "blocks/persistent.py",
        "head_block=section * p.section_heads + within - block * p.section_heads,",
        "head_block=within - block * p.section_heads,",
        chosen(FA3, "sections_of_single"),
    ),
    Fault(
        "the last split goes on past the keys",
        "blocks/persistent.py",
        "kv_end=ptx.minimum(begin + p.split_tokens, p.kv_len),",
        "kv_end=begin + p.split_tokens,",
        CUTS,
    ),
    Fault(
        "all splits write the first one's partials",
        "fa3.py",
        "slab = Int64(work.partial) * Int64(p.qo_len) * Int64(p.num_qo_heads)",
        "slab = Int64(0) * Int64(p.qo_len) * Int64(p.num_qo_heads)",
        CUTS,
    ),
    Fault(
        "partials of a batch have no place of their own a head",
        "fa3.py",
        "slot = Int64(work.partial) * Int64(p.head_blocks) + Int64(work.head_block)",
        "slot = Int64(work.partial) * Int64(p.head_blocks)",
        chosen(COMBINE, "fa3 and eager"),
    ),
    Fault(
        "records without work are work",
        "blocks/persistent.py",
        "head_block=ptx.select(item.qo_len == Int32(0), Int32(NO_WORK), head_block),",
        "head_block=head_block,",
        chosen(COMBINE, "fa3 and eager"),
        "its tile has neither rows nor keys: nothing is written, and only time is lost",
    ),
    Fault(
        "Q is given up before its last product",
        "fa3.py",
        "                state = self.attend(shared, math, k)\n                shared.q.release(q, lanes.lane)\n",
        "                shared.q.release(q, lanes.lane)\n                state = self.attend(shared, math, k)\n",
        MIXED,
    ),
)

GATHERED = (
    Fault(
        "gathered rows are not fenced",
        "blocks/gather.py",
        "        sm90.fence_async()\n        ptx.sync_warp()\n",
        "        ptx.sync_warp()\n",
        GATHER,
    ),
    Fault(
        "a warp's first lane does not wait for the others",
        "blocks/gather.py",
        "        sm90.fence_async()\n        ptx.sync_warp()\n",
        "        sm90.fence_async()\n",
        GATHER,
        "the lanes of a warp go in step on the emulator; on a GPU they need not",
    ),
    Fault("a copy may still be under way", "blocks/gather.py", "ptx.cp_async_wait(0)", "ptx.cp_async_wait(1)", GATHER),
    Fault(
        "rows past the end are copied",
        "blocks/gather.py",
        "size = ptx.select(left > Int32(ROWS_A_PASS * i), Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        GATHER,
    ),
    Fault(
        "a row too many is copied",
        "blocks/gather.py",
        "left = self.kv_end - (token - lane + row)",
        "left = self.kv_end - (token - lane + row) + Int32(1)",
        GATHER,
    ),
    Fault(
        "every second pass has the swizzle of the first",
        "blocks/gather.py",
        "place = shared ^ Int32(ROWS_A_PASS * CHUNK) if i % 2 else shared",
        "place = shared",
        GATHER,
    ),
    Fault(
        "half a line counts as a whole one",
        "blocks/gather.py",
        "part = size if whole else ptx.select(chunk < rows.chunks - line * 8, size, Int32(0))",
        "part = size",
        chosen(FA3, "test_gathered_pages and d96x96"),
    ),
    Fault(
        "page numbers past the last are read",
        "blocks/gather.py",
        "exists = cutlass.and_(row < self.warp_rows, token < self.kv_end)",
        "exists = row < self.warp_rows",
        GATHER,
    ),
    Fault(
        "the next lane's page",
        "blocks/gather.py",
        "source = ptx.shuffle_address(address, row + Int32(ROWS_A_PASS * i))",
        "source = ptx.shuffle_address(address, (row + Int32(ROWS_A_PASS * i + 1)) & 31)",
        GATHER,
    ),
    Fault(
        "only the first barrier hears of a step's copies",
        "blocks/gather.py",
        "for i in cutlass.range_constexpr(len(barriers)):",
        "for i in cutlass.range_constexpr(1):",
        GATHER,
    ),
    Fault(
        "boxes begin with their page",
        "blocks/boxes.py",
        "within = token - self.page_size.quotient(token) * self.page_size.value",
        "within = Int32(0)",
        BOXES,
    ),
    Fault(
        "page numbers of boxes past the last are read",
        "blocks/boxes.py",
        "exists = cutlass.and_(row < self.cols, token < self.kv_end)",
        "exists = row < self.cols",
        BOXES,
    ),
    Fault(
        "requests begin at the first key of all",
        "blocks/boxes.py",
        "self.start + kv_tile * self.cols, self.kv_head",
        "kv_tile * self.cols, self.kv_head",
        RAGGED,
    ),
)

SIGNED = chosen(FP8, "signed and (70x5 or 130)")
EIGHT = chosen(FP8, "ragged-70x0")
FP8_FAULTS = (
    Fault(
        "even dimensions are odd ones", "blocks/fp8.py", "ptx.permute(c, d, 0x6420)", "ptx.permute(c, d, 0x7531)", EIGHT
    ),
    Fault("keys of V change places", "blocks/fp8.py", "ptx.permute(a, b, 0x6420)", "ptx.permute(b, a, 0x6420)", EIGHT),
    Fault(
        "one row of the next request keeps its values (fp8)",
        "blocks/fp8.py",
        "at = source + first * LINE + chunk * 16",
        "at = source + (first + 1) * LINE + chunk * 16",
        EIGHT,
    ),
    Fault(
        "warps do not wait for rows that another clears",
        "blocks/fp8.py",
        "        sm90.named_sync(Int32(self.barrier), 32 * self.warps)\n",
        "",
        EIGHT,
    ),
    Fault(
        "a transposed tile is not fenced",
        "fa3_fp8.py",
        "work.run(shared.arriving_v.address(v), shared.v.address(v))\n                sm90.fence_async()\n",
        "work.run(shared.arriving_v.address(v), shared.v.address(v))\n",
        EIGHT,
    ),
    Fault(
        "transposers write over what is being read",
        "fa3_fp8.py",
        "                shared.v.wait_empty(v)\n                work.run(",
        "                work.run(",
        EIGHT,
    ),
    Fault(
        "rows of a negative scale keep their sign",
        "fa3_fp8.py",
        "turned = self.row_scale(p, work, work.rows(p).head(lanes.group * ROWS + row)) < Float32(0.0)",
        "turned = self.row_scale(p, work, work.rows(p).head(lanes.group * ROWS + row)) < Float32(-1e30)",
        SIGNED,
    ),
    Fault(
        "turned rows are not fenced",
        "fa3_fp8.py",
        "            sm90.fence_async()\n            ptx.sync_warp()\n\n    def kv_head",
        "            ptx.sync_warp()\n\n    def kv_head",
        SIGNED,
    ),
    Fault(
        "negative scales stay",
        "fa3_fp8.py",
        "scales.append(ptx.fmax(ptx.magnitude(row_scale), Float32(LEAST_SCALE)))",
        "scales.append(row_scale)",
        SIGNED,
    ),
    Fault(
        "a scale of 0 stays",
        "fa3_fp8.py",
        "scales.append(ptx.fmax(ptx.magnitude(row_scale), Float32(LEAST_SCALE)))",
        "scales.append(ptx.magnitude(row_scale))",
        chosen(FP8, "single-20-200"),
    ),
    Fault(
        "k's scale is that of the first head",
        "fa3_fp8.py",
        "head_scale(p.scale_k, self.kv_head(p, work))",
        "head_scale(p.scale_k, Int32(0))",
        SIGNED,
    ),
    Fault(
        "q's scale is that of the first head",
        "fa3_fp8.py",
        "* head_scale(p.scale_q, head)",
        "* head_scale(p.scale_q, Int32(0))",
        SIGNED,
    ),
    Fault(
        "partial outputs lack their head's scale",
        "blocks/fp8.py",
        "return factor * self.v_scale, lse",
        "return factor, lse",
        chosen(FP8, "test_cut_keys and signed"),
    ),
    Fault(
        "neighbouring dimensions change places",
        "blocks/fp8.py",
        "[values[i], values[i + 2], values[i + 1], values[i + 3]]",
        "[values[i], values[i + 1], values[i + 2], values[i + 3]]",
        EIGHT,
    ),
)

MANY = chosen(XQA, "test_case and (long or more or edges)")
XQA_FAULTS = (
    Fault(
        "a share begins in the segment before",
        "xqa/partition.py",
        "behind = passed <= share.begin",
        "behind = passed < share.begin",
        MANY,
    ),
    Fault(
        "a request without keys is nobody's",
        "xqa/partition.py",
        "return Part(begin, end, whole, cutlass.or_(begin < end, empty))",
        "return Part(begin, end, whole, begin < end)",
        MANY,
    ),
    Fault(
        "parts count as whole",
        "xqa/partition.py",
        "isa.all_of([begin == 0, end == tiles, tiles > 0])",
        "isa.all_of([begin == 0, tiles > 0])",
        MANY,
    ),
    Fault(
        "shares past the last request begin in one",
        "xqa/partition.py",
        "        index, passed = ptx.select(run == 1, ended, holder * run), before",
        "        index, passed = ptx.select(run == 1, holder, holder * run), before",
        chosen(XQA, "as_many_requests_as_lanes"),
    ),
    Fault(
        "arrivals are not counted from 0 again",
        "xqa/merge.py",
        "            if thread == 0:\n                isa.st_global_b32(counter, Int32(0))\n",
        "",
        MANY,
    ),
    Fault(
        "a part arrives before all of it is written",
        "xqa/merge.py",
        "        ptx.sync_threads()\n        if thread == 0:\n            ptx.st_shared_b32(ticket",
        "        if thread == 0:\n            ptx.st_shared_b32(ticket",
        MANY,
    ),
    Fault(
        "the ticket is read before it is there",
        "xqa/merge.py",
        "            ptx.st_shared_b32(ticket, 0, isa.arrive(counter))\n        ptx.sync_threads()\n",
        "            ptx.st_shared_b32(ticket, 0, isa.arrive(counter))\n",
        MANY,
    ),
    Fault(
        "warps' sums are read before they are there",
        "xqa/merge.py",
        "                self.gather(rows, first, count, start)\n            ptx.sync_threads()\n",
        "                self.gather(rows, first, count, start)\n",
        MANY,
    ),
    Fault(
        "a CTA's two places are one",
        "xqa/merge.py",
        "return self.cta(cute.arch.block_idx()[1]) * 2 + ptx.select(part.begin == 0, Int32(1), Int32(0))",
        "return self.cta(cute.arch.block_idx()[1]) * 2",
        MANY,
    ),
    Fault(
        "slots are filled again while they are read",
        "xqa/decode.py",
        "            ptx.sync_threads()  # the slots are free again\n",
        "",
        MANY,
    ),
    Fault(
        "lanes run ahead in the ring",
        "xqa/decode.py",
        "        ptx.cp_async_wait(ahead - 1)\n        ptx.sync_warp()",
        "        ptx.cp_async_wait(ahead - 1)\n        pass",
        MANY,
    ),
    Fault(
        "a tile may still be under way",
        "xqa/decode.py",
        "        ptx.cp_async_wait(ahead - 1)\n",
        "        ptx.cp_async_wait(ahead)\n",
        MANY,
    ),
    Fault(
        "a tree cannot hide its first token",
        "xqa/masks.py",
        "common = 0 if self.spec.tree else 1",
        "common = 1",
        chosen(XQA, "tree_that or (test_case and tree)"),
    ),
    Fault(
        "a window inside a tile is not looked at",
        "xqa/masks.py",
        "return cutlass.or_(start + self.spec.cols > self.prefix + common, start < newest)",
        "return start + self.spec.cols > self.prefix + common",
        chosen(XQA, "test_case and window"),
    ),
    Fault(
        "anchors of columns stay",
        "xqa/softmax.py",
        "out = [x * factors[self.slot(i)] for i, x in enumerate(running.out)]",
        "out = list(running.out)",
        MANY,
    ),
    Fault(
        "tokens past the end are copied",
        "xqa/pages.py",
        "size = ptx.select(exists, Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        MANY,
    ),
    Fault(
        "block scales of tokens past the end are copied",
        "xqa/pages.py",
        "present = ptx.select(self.readable(start + lane + 32 * i), Int32(size), Int32(0))",
        "present = Int32(size)",
        MANY,
    ),
    Fault(
        "the second scale of a pair is the first",
        "xqa/formats.py",
        "selector = ptx.select(lane >> 1 & 1 == 0, Int32(0x6420), Int32(0x7531))",
        "selector = Int32(0x6420)",
        MANY,
    ),
)

FAULTS = (*HINDSIGHT, *TILES, *PERSISTENT, *GATHERED, *FP8_FAULTS, *XQA_FAULTS)
