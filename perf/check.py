"""Is what was timed also right? Every candidate's output is held against the reference before it counts."""

from __future__ import annotations

from typing import cast

import torch

from cute_attn.reference import attention as reference
from perf.batch_workloads import BatchInputs, BatchWorkload
from perf.workloads import Inputs, Workload

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "e4m3": 6e-2}  # e4m3: probabilities are rounded to it
FP8_TOLERANCE = 5e-2  # over caches of 8 bits or fewer: FlashInfer's XQA rounds q and P to fp8, too (0.035 to 0.038)
NUM_ROWS = 64  # query rows checked: a quarter at either end, the others spread evenly


def checked_rows(qo_len: int) -> list[int]:
    """Indices of the query rows that are compared."""
    if qo_len <= NUM_ROWS:
        return list(range(qo_len))
    edge = NUM_ROWS // 4
    middle = [edge + i * (qo_len - 2 * edge) // (2 * edge) for i in range(2 * edge)]
    return [*range(edge), *middle, *range(qo_len - edge, qo_len)]


class Oracle:
    """The reference's fp64 answer `o` for the rows `rows` of a candidate's output."""

    def __init__(self, rows: torch.Tensor, o: torch.Tensor, tolerance: float) -> None:
        self.rows, self.o, self.tolerance = rows, o, tolerance

    @classmethod
    def of(cls, w: Workload, x: Inputs) -> Oracle:
        rows, o = _answer(w, x.q, x.k, x.v)
        return cls(rows, o, TOLERANCE[w.dtype])

    @classmethod
    def of_batch(cls, w: BatchWorkload, x: BatchInputs) -> Oracle:
        """Checks the first request, the middle one, the last one and the longest."""
        longest = max(range(len(w.kv_lens)), key=w.kv_lens.__getitem__)
        rows, answers = [], []
        for request in sorted({0, len(w.kv_lens) // 2, longest, len(w.kv_lens) - 1}):
            start, stop = w.qo_indptr[request], w.qo_indptr[request + 1]
            own, o = _answer(w.requests[request], x.q[start:stop], *w.tokens(x, request))
            rows.append(own + start)
            answers.append(o)
        tolerance = FP8_TOLERANCE if w.torch_kv_dtype.itemsize == 1 else TOLERANCE[w.dtype]
        return cls(torch.cat(rows), torch.cat(answers), tolerance)

    def error(self, o: torch.Tensor) -> float:
        """Root-mean-square difference over root-mean-square value: the outputs of long rows are small, so a
        difference counts only relative to them. NaN where o is."""
        o = o.reshape(-1, *o.shape[-2:])  # peers keep an axis of requests
        return float(torch.linalg.vector_norm(o[self.rows].double() - self.o) / torch.linalg.vector_norm(self.o))

    def complaint(self, error: float) -> str | None:
        """Why a candidate with this error does not count, or None."""
        if error <= self.tolerance:
            return None
        return f"wrong: relative error {error:.2e} against the reference (allowed {self.tolerance:.1e})"


def _answer(w: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The checked rows of one request, and the reference's output for them."""
    rows = torch.tensor(checked_rows(w.qo_len), device=q.device)
    keep = None
    if w.causal:
        last_key = rows[:, None] + w.kv_len - w.qo_len
        keep = torch.arange(w.kv_len, device=q.device) <= last_key
    o, _ = reference.attention(q[rows], k, v, mask=reference.Mask(keep=keep))
    return rows, o


def oracle(w: Workload | BatchWorkload, x: Inputs | BatchInputs) -> Oracle:
    if isinstance(w, BatchWorkload):
        return Oracle.of_batch(w, cast(BatchInputs, x))
    return Oracle.of(w, cast(Inputs, x))
