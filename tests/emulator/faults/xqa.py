"""Faults in XQA decode: partition among CTAs, merge, rings, masks, formats."""

from __future__ import annotations

from tests.emulator.faults.fault import IN_STEP, Fault, chosen

MANY = chosen("xqa", "test_case and (long or more or edges or begin)")
HEAD_DIMS = chosen("xqa", "test_head_dims")
RISING = chosen("xqa_wrappers", "test_scores_that_rise")
XQA_FAULTS = (
    Fault(
        "a share begins in the previous segment",
        "xqa/parts/partition.py",
        "behind = passed <= share.begin",
        "behind = passed < share.begin",
        MANY,
    ),
    Fault(
        "a request without keys is given to no CTA",
        "xqa/parts/partition.py",
        "return KvSplit(begin, end, whole, cutlass.or_(begin < end, empty))",
        "return KvSplit(begin, end, whole, begin < end)",
        MANY,
    ),
    Fault(
        "splits count as whole segments",
        "xqa/parts/partition.py",
        "isa.all_of([begin == 0, end == tiles, tiles > 0])",
        "isa.all_of([begin == 0, tiles > 0])",
        MANY,
    ),
    Fault(
        "shares past the last request begin in a request",
        "xqa/parts/partition.py",
        "        index, passed = ptx.select(run == 1, ended, holder * run), before",
        "        index, passed = ptx.select(run == 1, holder, holder * run), before",
        chosen("xqa", "as_many_requests_as_lanes"),
    ),
    Fault(
        "the arrival counter is not reset",
        "xqa/parts/merge.py",
        "            self.reset(counter)\n",
        "",
        MANY,
    ),
    Fault(
        "a partial is announced before all of it is written",
        "xqa/parts/merge.py",
        "        self.sync()\n        if cute.arch.thread_idx()[0] == 0:\n            ptx.st_shared_b32(ticket",
        "        if cute.arch.thread_idx()[0] == 0:\n            ptx.st_shared_b32(ticket",
        MANY,
    ),
    Fault(
        "the ticket is read before it is written",
        "xqa/parts/merge.py",
        "            ptx.st_shared_b32(ticket, 0, isa.add_arrival(counter))\n        self.sync()\n",
        "            ptx.st_shared_b32(ticket, 0, isa.add_arrival(counter))\n",
        MANY,
    ),
    Fault(
        "warps' sums are read before they are written",
        "xqa/parts/merge.py",
        "                self.reduce_partials(rows, first, count, start)\n            self.sync()\n",
        "                self.reduce_partials(rows, first, count, start)\n",
        MANY,
    ),
    Fault(
        "a CTA's two partials share one index",
        "xqa/parts/merge.py",
        "return self.cta_index(cute.arch.block_idx()[1]) * 2 + ptx.select(split.begin == 0, Int32(1), Int32(0))",
        "return self.cta_index(cute.arch.block_idx()[1]) * 2",
        MANY,
    ),
    Fault(
        "slots are refilled while they are read",
        "xqa/kernel.py",
        "            ptx.sync_threads()  # before the slots are filled again\n",
        "",
        MANY,
    ),
    Fault(
        "lanes of a warp refill slots that other lanes still read",
        "xqa/kernel.py",
        "        ptx.cp_async_wait(ahead - 1)\n        ptx.sync_warp()",
        "        ptx.cp_async_wait(ahead - 1)\n        pass",
        MANY,
        IN_STEP,
    ),
    Fault(
        "a tile may still be in flight",
        "xqa/kernel.py",
        "        ptx.cp_async_wait(ahead - 1)\n",
        "        ptx.cp_async_wait(ahead)\n",
        MANY,
    ),
    Fault(
        "a tree cannot hide its first token",
        "xqa/parts/masks.py",
        "common = 0 if self.spec.tree else 1",
        "common = 1",
        chosen("xqa", "test_case and tree"),
    ),
    Fault(
        "a window inside a tile is ignored",
        "xqa/parts/masks.py",
        "return cutlass.or_(start + self.spec.cols > self.prefix + common, start < window_start)",
        "return start + self.spec.cols > self.prefix + common",
        chosen("xqa", "test_case and window"),
    ),
    Fault(
        "outputs of columns are not rescaled",
        "xqa/parts/softmax.py",
        "out = [x * factors[self.slot(i)] for i, x in enumerate(running.out)]",
        "out = list(running.out)",
        RISING,
    ),
    Fault(
        "tokens past the end are copied",
        "xqa/parts/pages.py",
        "size = ptx.select(exists, Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        MANY,
    ),
    Fault(
        "what lies behind a row is copied",
        "xqa/parts/pages.py",
        "return size if chunks >= self.layout.lanes_per_row else ptx.select(chunk < chunks, size, Int32(0))",
        "return size",
        HEAD_DIMS,
    ),
    Fault(
        "a warp does not wait for its team's scores",
        "xqa/parts/team.py",
        "        named_sync(FIRST_BARRIER + self.number(warp_index()), 32 * self.size)\n",
        "",
        HEAD_DIMS,
    ),
    Fault(
        "scores are exchanged in one buffer",
        "xqa/parts/team.py",
        "(tile & 1) * size",
        "(tile & 0) * size",
        HEAD_DIMS,
    ),
    Fault(
        "partial scores are scaled by the factor of another row",
        "xqa/parts/team.py",
        "scaled = [x * log2_scale[i // 4 % (slots // 2) * 2 + i % 2] for i, x in enumerate(s)]",
        "scaled = [x * log2_scale[0] for i, x in enumerate(s)]",
        chosen("xqa", "scale_their_columns"),
    ),
    Fault(
        "block scales of tokens past the end are copied",
        "xqa/parts/pages.py",
        "present = ptx.select(self.readable(start + lane + 32 * i), Int32(size), Int32(0))",
        "present = Int32(size)",
        MANY,
    ),
    Fault(
        "the first scale of a pair is used twice",
        "xqa/parts/formats.py",
        "selector = ptx.select(lane >> 1 & 1 == 0, Int32(0x6420), Int32(0x7531))",
        "selector = Int32(0x6420)",
        MANY,
    ),
    Fault(
        "scales of V's first tokens serve all",
        "xqa/parts/block_format.py",
        "words[m * groups : (m + 1) * groups]",
        "words[:groups]",
        chosen("xqa_blackwell", "test_case and blocks"),
    ),
)
