"""Is what was timed also right? Every candidate's output is held against the reference before it counts."""

from __future__ import annotations

import torch

from cute_attn import reference
from perf.workloads import Inputs, Workload

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
NUM_ROWS = 64  # query rows checked: a quarter at either end, the others spread evenly


def checked_rows(qo_len: int) -> list[int]:
    """Indices of the query rows that are compared."""
    if qo_len <= NUM_ROWS:
        return list(range(qo_len))
    edge = NUM_ROWS // 4
    middle = [edge + i * (qo_len - 2 * edge) // (2 * edge) for i in range(2 * edge)]
    return [*range(edge), *middle, *range(qo_len - edge, qo_len)]


class Oracle:
    """The reference's fp64 answer for the checked rows of one workload on one set of inputs."""

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.rows = torch.tensor(checked_rows(workload.qo_len), device=inputs.q.device)
        keep = None
        if workload.causal:
            last_key = self.rows[:, None] + workload.kv_len - workload.qo_len
            keep = torch.arange(workload.kv_len, device=inputs.q.device) <= last_key
        mask = reference.Mask(keep=keep)
        self.o, _ = reference.attention(inputs.q[self.rows], inputs.k, inputs.v, mask=mask)
        self.tolerance = TOLERANCE[workload.dtype]

    def error(self, o: torch.Tensor) -> float:
        """Root-mean-square difference over root-mean-square value: the outputs of long rows are small, so a
        difference counts only relative to them. NaN where o is."""
        return float(torch.linalg.vector_norm(o[self.rows].double() - self.o) / torch.linalg.vector_norm(self.o))

    def complaint(self, error: float) -> str | None:
        """Why a candidate with this error does not count, or None."""
        if error <= self.tolerance:
            return None
        return f"wrong: relative error {error:.2e} against the reference (allowed {self.tolerance:.1e})"
