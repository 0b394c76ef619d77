"""Faults in the merge of partial outputs."""

from __future__ import annotations

from tests.emulator.faults.fault import Table, chosen

CUTS = chosen("persistent", "fa3 and (test_cut)")
LOOPED = chosen("graph_combine", "fa3 and cut")

COMBINING: Table = {
    CUTS: {
        "combine/kernel.py": {
            "all splits have the same weight": (
                "weights = [ptx.exp2(x - anchor) for x in lse]",
                "weights = [ptx.exp2(x - x) for x in lse]",
            ),
            "splits past the last one are merged": (
                "value = Float32(ptx.NEG_INF)\n            if split < row.num_splits:",
                "value = Float32(ptx.NEG_INF)\n            if split <= row.num_splits:",
            ),
            "warps' sums are stored before they are written": (
                "        self.sum_outputs(p, row, weights)\n        ptx.sync_threads()\n",
                "        self.sum_outputs(p, row, weights)\n",
            ),
            "the merge does not wait for the partials": (
                "            ptx.grid_dependency_wait()\n            ptx.grid_dependency_launch()",
                "            ptx.grid_dependency_launch()",
            ),
        },
    },
    LOOPED: {
        "combine/kernel.py": {
            "the next row's sums overwrite those being read": (
                "                    ptx.sync_threads()  # the next row's sums overwrite this one's\n",
                "",
            ),
            "a CTA merges only its first row": (
                "remaining = cutlass.and_(index < params.num_rows, cutlass.not_(row.last))",
                "remaining = Boolean(False)",
            ),
            "rows past the last one are merged": ("exists=packed < merge.qo_len * p.group,", "exists=Boolean(True),"),
        },
    },
}
