"""Faults in the merge of partial outputs."""

from __future__ import annotations

from tests.emulator.faults.fault import Table, chosen

CUTS = chosen("persistent", "fa3 and (test_cut)")
STATES = chosen("merge", "states_a_step_apart")
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
            "the merge does not wait for the partials": (
                "            ptx.grid_dependency_wait()\n            ptx.grid_dependency_launch()",
                "            ptx.grid_dependency_launch()",
            ),
        },
    },
    STATES: {
        "combine/kernel.py": {
            "only the first splits, loaded side by side, are merged": (
                "cutlass.range(0, row.num_splits, IN_FLIGHT * step, unroll=1)",
                "cutlass.range(0, 1, IN_FLIGHT * step, unroll=1)",
            ),
        },
    },
    LOOPED: {
        "combine/kernel.py": {
            "a warp merges only its first row": (
                "remaining = cutlass.and_(index < p.num_rows, cutlass.not_(row.last))",
                "remaining = Boolean(False)",
            ),
            "rows past the last one are merged": ("exists=packed < merge.qo_len * p.group,", "exists=Boolean(True),"),
        },
    },
}
