"""Faults in the merge of partial outputs."""

from __future__ import annotations

from tests.emulator.faults.fault import Fault, chosen

CUTS = chosen("persistent", "fa3 and (test_cut)")
LOOPED = chosen("graph_combine", "fa3 and cut")

COMBINING = (
    Fault(
        "all splits have the same weight",
        "combine/kernel.py",
        "weights = [ptx.exp2(x - anchor) for x in lse]",
        "weights = [ptx.exp2(x - x) for x in lse]",
        CUTS,
    ),
    Fault(
        "splits past the last one are merged",
        "combine/kernel.py",
        "value = Float32(ptx.NEG_INF)\n            if split < row.num_splits:",
        "value = Float32(ptx.NEG_INF)\n            if split <= row.num_splits:",
        CUTS,
    ),
    Fault(
        "warps' sums are stored before they are written",
        "combine/kernel.py",
        "        self.sum_outputs(p, row, weights)\n        ptx.sync_threads()\n",
        "        self.sum_outputs(p, row, weights)\n",
        CUTS,
    ),
    Fault(
        "the next row's sums overwrite those being read",
        "combine/kernel.py",
        "                    ptx.sync_threads()  # the next row's sums overwrite this one's\n",
        "",
        LOOPED,
    ),
    Fault(
        "a CTA merges only its first row",
        "combine/kernel.py",
        "remaining = cutlass.and_(index < params.num_rows, cutlass.not_(row.last))",
        "remaining = Boolean(False)",
        LOOPED,
    ),
    Fault(
        "rows past the last one are merged",
        "combine/kernel.py",
        "exists=packed < merge.qo_len * p.group,",
        "exists=Boolean(True),",
        LOOPED,
    ),
    Fault(
        "the merge does not wait for the partials",
        "combine/kernel.py",
        "            ptx.grid_dependency_wait()\n            ptx.grid_dependency_launch()",
        "            ptx.grid_dependency_launch()",
        CUTS,
    ),
)
