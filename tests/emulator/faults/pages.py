"""Faults in the Hopper kernel's loads of keys and values."""

from __future__ import annotations

from tests.emulator.faults.fault import IN_STEP, Table, chosen

GATHER = chosen("persistent", "fa3 and (test_gathered_pages and (70x260 or slack))")
BOXES = chosen("persistent", "fa3 and (test_long_batches and 130x500)")
RAGGED = chosen("persistent", "fa3 and (test_long_batches and ragged)")

GATHERED: Table = {
    GATHER: {
        "blocks/gathered_kv.py": {
            "gathered rows are not fenced": (
                "        tma.fence_async()\n        ptx.sync_warp()\n",
                "        ptx.sync_warp()\n",
            ),
            "a warp's first lane does not wait for the other lanes": (
                "        tma.fence_async()\n        ptx.sync_warp()\n",
                "        tma.fence_async()\n",
                IN_STEP,
            ),
            "a copy may still be in flight": ("ptx.cp_async_wait(0)", "ptx.cp_async_wait(1)"),
            "rows past the end are copied": (
                "size = ptx.select(left > Int32(ROWS_PER_PASS * j), Int32(CHUNK), Int32(0))",
                "size = Int32(CHUNK)",
            ),
            "one row too many is copied": (
                "left = self.kv_end - (token - lane + row)",
                "left = self.kv_end - (token - lane + row) + Int32(1)",
            ),
            "every second pass uses the swizzle of the first": (
                "destination = shared ^ Int32(ROWS_PER_PASS * CHUNK) if first // ROWS_PER_PASS % 2 else shared",
                "destination = shared",
            ),
            "page ids past the last one are read": (
                "exists = cutlass.and_(self.thread & 31 < self.round_rows, token < self.kv_end)",
                "exists = self.thread & 31 < self.round_rows",
            ),
            "a row is copied from the next lane's page": (
                "source = ptx.shuffle_address(address, row + Int32(ROWS_PER_PASS * j))",
                "source = ptx.shuffle_address(address, (row + Int32(ROWS_PER_PASS * j + 1)) & 31)",
            ),
            "copies arrive only at the first barrier of a step": (
                "for i in cutlass.range_constexpr(len(barriers)):",
                "for i in cutlass.range_constexpr(1):",
            ),
        },
    },
    chosen("persistent", "fa3 and (test_gathered_pages and d96x96)"): {
        "blocks/gathered_kv.py": {
            "half a line counts as a full one": (
                "part = size if whole else ptx.select(chunk < rows.chunks - line * 8, size, Int32(0))",
                "part = size",
            ),
        },
    },
    BOXES: {
        "blocks/tma_kv.py": {
            "boxes always begin at the start of their page": (
                "within = token - self.page_size.quotient(token) * self.page_size.value",
                "within = Int32(0)",
            ),
        },
    },
    chosen("persistent", "fa3 and (test_long_batches and 70x260)"): {
        "blocks/tma_kv.py": {
            "page ids of boxes past the last one are read": (
                "exists = cutlass.and_(row < self.cols, token < self.kv_end)",
                "exists = row < self.cols",
            ),
        },
    },
    RAGGED: {
        "blocks/tma_kv.py": {
            "all requests begin at key 0": (
                "token = self.start + kv_tile * self.cols + operand.first_key",
                "token = kv_tile * self.cols + operand.first_key",
            ),
        },
    },
}
