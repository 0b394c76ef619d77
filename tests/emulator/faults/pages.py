"""Faults in the Hopper kernel's loads of keys and values."""

from __future__ import annotations

from tests.emulator.faults.fault import IN_STEP, Fault, chosen

GATHER = chosen("persistent", "fa3 and (test_gathered_pages and (70x260 or slack))")
BOXES = chosen("persistent", "fa3 and (test_long_batches and 130x500)")
RAGGED = chosen("persistent", "fa3 and (test_long_batches and ragged)")

GATHERED = (
    Fault(
        "gathered rows are not fenced",
        "blocks/gathered_kv.py",
        "        tma.fence_async()\n        ptx.sync_warp()\n",
        "        ptx.sync_warp()\n",
        GATHER,
    ),
    Fault(
        "a warp's first lane does not wait for the other lanes",
        "blocks/gathered_kv.py",
        "        tma.fence_async()\n        ptx.sync_warp()\n",
        "        tma.fence_async()\n",
        GATHER,
        IN_STEP,
    ),
    Fault(
        "a copy may still be in flight",
        "blocks/gathered_kv.py",
        "ptx.cp_async_wait(0)",
        "ptx.cp_async_wait(1)",
        GATHER,
    ),
    Fault(
        "rows past the end are copied",
        "blocks/gathered_kv.py",
        "size = ptx.select(left > Int32(ROWS_PER_PASS * j), Int32(CHUNK), Int32(0))",
        "size = Int32(CHUNK)",
        GATHER,
    ),
    Fault(
        "one row too many is copied",
        "blocks/gathered_kv.py",
        "left = self.kv_end - (token - lane + row)",
        "left = self.kv_end - (token - lane + row) + Int32(1)",
        GATHER,
    ),
    Fault(
        "every second pass uses the swizzle of the first",
        "blocks/gathered_kv.py",
        "destination = shared ^ Int32(ROWS_PER_PASS * CHUNK) if first // ROWS_PER_PASS % 2 else shared",
        "destination = shared",
        GATHER,
    ),
    Fault(
        "half a line counts as a full one",
        "blocks/gathered_kv.py",
        "part = size if whole else ptx.select(chunk < rows.chunks - line * 8, size, Int32(0))",
        "part = size",
        chosen("persistent", "fa3 and (test_gathered_pages and d96x96)"),
    ),
    Fault(
        "page ids past the last one are read",
        "blocks/gathered_kv.py",
        "exists = cutlass.and_(self.thread & 31 < self.round_rows, token < self.kv_end)",
        "exists = self.thread & 31 < self.round_rows",
        GATHER,
    ),
    Fault(
        "a row is copied from the next lane's page",
        "blocks/gathered_kv.py",
        "source = ptx.shuffle_address(address, row + Int32(ROWS_PER_PASS * j))",
        "source = ptx.shuffle_address(address, (row + Int32(ROWS_PER_PASS * j + 1)) & 31)",
        GATHER,
    ),
    Fault(
        "copies arrive only at the first barrier of a step",
        "blocks/gathered_kv.py",
        "for i in cutlass.range_constexpr(len(barriers)):",
        "for i in cutlass.range_constexpr(1):",
        GATHER,
    ),
    Fault(
        "boxes always begin at the start of their page",
        "blocks/tma_kv.py",
        "within = token - self.page_size.quotient(token) * self.page_size.value",
        "within = Int32(0)",
        BOXES,
    ),
    Fault(
        "page ids of boxes past the last one are read",
        "blocks/tma_kv.py",
        "exists = cutlass.and_(row < self.cols, token < self.kv_end)",
        "exists = row < self.cols",
        chosen("persistent", "fa3 and (test_long_batches and 70x260)"),
    ),
    Fault(
        "all requests begin at key 0",
        "blocks/tma_kv.py",
        "token = self.start + kv_tile * self.cols + operand.first_key",
        "token = kv_tile * self.cols + operand.first_key",
        RAGGED,
    ),
)
