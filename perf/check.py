"""Correctness before speed: every candidate's output is compared with the reference before its time counts."""

from __future__ import annotations

from typing import cast

import torch

from cute_attn.reference import attention as reference
from perf.workloads import BatchInputs, BatchWorkload, Inputs, Workload

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "e4m3": 6e-2}  # with e4m3, probabilities are rounded to it, too
FP8_TOLERANCE = 5e-2  # for caches of 8 bits or fewer: FlashInfer's XQA also rounds q and P to fp8 (0.035 to 0.038)
NUM_ROWS = 64  # query rows that are checked: a quarter at each end, the others evenly spaced


def checked_rows(qo_len: int) -> list[int]:
    """Returns the indices of the query rows that are compared."""
    if qo_len <= NUM_ROWS:
        return list(range(qo_len))
    edge = NUM_ROWS // 4
    middle = [edge + i * (qo_len - 2 * edge) // (2 * edge) for i in range(2 * edge)]
    return [*range(edge), *middle, *range(qo_len - edge, qo_len)]


class Oracle:
    """Reference output `o` in fp64 for the rows `rows` of a candidate's output."""

    def __init__(self, rows: torch.Tensor, o: torch.Tensor, tolerance: float) -> None:
        self.rows, self.o, self.tolerance = rows, o, tolerance

    @classmethod
    def of(cls, w: Workload, x: Inputs) -> Oracle:
        rows, o = _expected(w, x.q, x.k, x.v)
        return cls(rows, o, TOLERANCE[w.dtype])

    @classmethod
    def of_batch(cls, w: BatchWorkload, x: BatchInputs) -> Oracle:
        """Returns an oracle for the first, the middle, the last and the longest request."""
        longest = max(range(len(w.kv_lens)), key=w.kv_lens.__getitem__)
        rows, answers = [], []
        for request in sorted({0, len(w.kv_lens) // 2, longest, len(w.kv_lens) - 1}):
            start, stop = w.qo_indptr[request], w.qo_indptr[request + 1]
            own, o = _expected(w.requests[request], x.q[start:stop], *w.tokens(x, request), x.sinks)
            rows.append(own + start)
            answers.append(o)
        tolerance = FP8_TOLERANCE if w.torch_kv_dtype.itemsize == 1 else TOLERANCE[w.dtype]
        return cls(torch.cat(rows), torch.cat(answers), tolerance)

    def error(self, o: torch.Tensor) -> float:
        """Returns the root mean square of the difference relative to that of the output; NaN if o contains NaN.

        A difference counts only relative to the output, because outputs of long rows are small.
        """
        o = o.reshape(-1, *o.shape[-2:])  # some peers have a batch axis
        return float(torch.linalg.vector_norm(o[self.rows].double() - self.o) / torch.linalg.vector_norm(self.o))

    def rejection(self, error: float) -> str | None:
        """Returns why a candidate with this error is rejected, or None."""
        if error <= self.tolerance:
            return None
        return f"wrong: relative error {error:.2e} against the reference (allowed {self.tolerance:.1e})"


def _expected(
    w: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the checked rows of one request, and the reference's output for them."""
    rows = torch.tensor(checked_rows(w.qo_len), device=q.device)
    keep = None
    if w.causal:
        last_key = rows[:, None] + w.kv_len - w.qo_len
        keys = torch.arange(len(k), device=q.device)
        keep = keys <= last_key
        if w.window_left >= 0:
            keep &= keys >= last_key - w.window_left
    o, _ = reference.attention(q[rows], k, v, mask=reference.Mask(keep=keep), sinks=sinks)
    return rows, o


def oracle(w: Workload | BatchWorkload, x: Inputs | BatchInputs) -> Oracle:
    """Returns the oracle of a workload with these inputs."""
    if isinstance(w, BatchWorkload):
        return Oracle.of_batch(w, cast(BatchInputs, x))
    return Oracle.of(w, cast(Inputs, x))
