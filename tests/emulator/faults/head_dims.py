"""Faults in the exchange between warps that divide wide outputs, and at the ends of rows."""

from __future__ import annotations

from tests.emulator.faults.fault import Table, chosen

HALVES = "tests/wrappers/test_half_aligned_rows.py", "-k", "test_batch and sm_90a and d24"
WIDE = chosen("head_dims", "rise or (wide and q40-k100 and adversarial)")

HEAD_DIM_FAULTS: Table = {
    WIDE: {
        "fa2/parts/exchange.py": {
            "maxima are read before all warps have put theirs": (
                "        exchange.put_column(softmax.row_max(s))\n        ptx.sync_threads()\n",
                "        exchange.put_column(softmax.row_max(s))\n",
            ),
            "P is read before all warps have written theirs": (
                "        total = softmax.sums(p, total)\n        ptx.sync_threads()\n",
                "        total = softmax.sums(p, total)\n",
            ),
            "anchors follow the warp's own maxima": (
                "row_max = [self.maximum(exchange.columns(exchange.lanes.row(slot))) for slot in softmax.slots]",
                "row_max = softmax.row_max(s)",
            ),
            "slices of the output are not rescaled": (
                "any_of([factor != Float32(1.0) for factor in factors])",
                "any_of([factor < Float32(0.0) for factor in factors])",
            ),
            "the sums overwrite maxima that are still read": (
                "        ptx.sync_threads()  # the last reads of P, the factors and Q are done\n",
                "",
            ),
        },
    },
    chosen("matrix", "d40x72 and sm_90a"): {
        "fa2/parts/epilogue.py": {
            "fp32 columns past the head dimension are stored": (
                "places = [i for i, column in self.layout.pairs(slot) if column < self.memory.head_dim_vo]",
                "places = [i for i, column in self.layout.pairs(slot)]",
            ),
        },
    },
    HALVES: {
        "fa2/parts/kv.py": {
            "the half of a chunk that lies past the end of a row is read": (
                "-(-(self.row_bytes - line * LINE - start) // CHUNK)",
                "-(-(self.row_bytes - line * LINE) // CHUNK)",
            ),
        },
        "fa2/parts/convert.py": {
            "the last half of a chunk is not converted": (
                "-(-memory.k_bytes // CHUNK), -(-memory.v_bytes // CHUNK)",
                "memory.k_bytes // CHUNK, memory.v_bytes // CHUNK",
            ),
        },
    },
    chosen("persistent", "fa3 and (test_single and d72)"): {
        "blocks/warpgroup_store.py": {
            "all lanes store the last chunks of a row": ("if self.quad_lane < rest:", "if self.quad_lane < 4:"),
        },
    },
}
