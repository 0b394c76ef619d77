"""Faults in the exchange between warps that divide wide outputs, and at the ends of rows."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

HALVES = "tests/wrappers/test_half_aligned_rows.py", "-k", "test_batch and sm_90a and d24"
WIDE = chosen("head_dims", "rise or (wide and q40-k100 and adversarial)")

HEAD_DIM_FAULTS = (
    Fault(
        "maxima are read before all warps have put theirs",
        "fa2/parts/exchange.py",
        "        exchange.put_column(softmax.row_max(s))\n        ptx.sync_threads()\n",
        "        exchange.put_column(softmax.row_max(s))\n",
        WIDE,
    ),
    Fault(
        "P is read before all warps have written theirs",
        "fa2/parts/exchange.py",
        "        total = softmax.sums(p, total)\n        ptx.sync_threads()\n",
        "        total = softmax.sums(p, total)\n",
        WIDE,
    ),
    Fault(
        "anchors follow the warp's own maxima",
        "fa2/parts/exchange.py",
        "row_max = [self.maximum(exchange.columns(exchange.lanes.row(slot))) for slot in softmax.slots]",
        "row_max = softmax.row_max(s)",
        WIDE,
    ),
    Fault(
        "slices of the output are not rescaled",
        "fa2/parts/exchange.py",
        "any_of([factor != Float32(1.0) for factor in factors])",
        "any_of([factor < Float32(0.0) for factor in factors])",
        WIDE,
    ),
    Fault(
        "the sums overwrite maxima that are still read",
        "fa2/parts/exchange.py",
        "        ptx.sync_threads()  # the last reads of P, the factors and Q are done\n",
        "",
        WIDE,
    ),
    Fault(
        "fp32 columns past the head dimension are stored",
        "fa2/parts/epilogue.py",
        "places = [i for i, column in self.layout.pairs(slot) if column < self.memory.head_dim_vo]",
        "places = [i for i, column in self.layout.pairs(slot)]",
        chosen("matrix", "d40x72 and sm_90a"),
    ),
    Fault(
        "the half of a chunk that lies past the end of a row is read",
        "fa2/parts/kv.py",
        "-(-(self.row_bytes - line * LINE - start) // CHUNK)",
        "-(-(self.row_bytes - line * LINE) // CHUNK)",
        HALVES,
    ),
    Fault(
        "the last half of a chunk is not converted",
        "fa2/parts/convert.py",
        "-(-memory.k_bytes // CHUNK), -(-memory.v_bytes // CHUNK)",
        "memory.k_bytes // CHUNK, memory.v_bytes // CHUNK",
        HALVES,
    ),
    Fault(
        "all lanes store the last chunks of a row",
        "blocks/warpgroup_store.py",
        "if self.quad_lane < rest:",
        "if self.quad_lane < 4:",
        chosen("persistent", "fa3 and (test_single and d72)"),
    ),
)
