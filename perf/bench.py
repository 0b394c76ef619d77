"""A row: our backends and every peer, checked against the reference and timed together, and its record."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cute_attn.reference import attention as reference
from perf import peers
from perf.harness import ROUNDS, Call, CudaGraphTimer, measure, reason
from perf.machine import require
from perf.peers import PEERS, Bind
from perf.workloads import BatchInputs, BatchWorkload

OURS = "cute_attn"  # prefix of the names of our candidates
HOST_LENGTHS = f"{OURS} host lengths"
SAME = "it is what auto runs"
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "e4m3": 6e-2}  # with e4m3, probabilities are rounded to it, too
FP8_TOLERANCE = 5e-2  # for caches of 8 bits or fewer: FlashInfer's XQA also rounds q and P to fp8 (0.035 to 0.038)
NUM_ROWS = 64  # query rows that are checked: a quarter at each end, the others evenly spaced


# ---- correctness before speed: every output is compared with the reference before its time counts


def checked_rows(qo_len: int) -> list[int]:
    """Returns the indices of the query rows that are compared."""
    if qo_len <= NUM_ROWS:
        return list(range(qo_len))
    edge = NUM_ROWS // 4
    middle = [edge + i * (qo_len - 2 * edge) // (2 * edge) for i in range(2 * edge)]
    return [*range(edge), *middle, *range(qo_len - edge, qo_len)]


@dataclass(frozen=True)
class Oracle:
    """Reference output `o` in fp64 for the rows `rows` of a candidate's output."""

    rows: torch.Tensor
    o: torch.Tensor
    tolerance: float

    def error(self, output: torch.Tensor | tuple[torch.Tensor, float]) -> float:
        """Returns the root mean square of the difference relative to that of the output; NaN if o contains NaN.
        `output`: o, or o and a factor of it.

        A difference counts only relative to the output, because outputs of long rows are small.
        """
        o, factor = output if isinstance(output, tuple) else (output, 1.0)
        o = o.reshape(-1, *o.shape[-2:])  # some peers have a batch axis
        difference = o[self.rows].double() * factor - self.o
        return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(self.o))

    def rejection(self, error: float) -> str | None:
        """Returns why a candidate with this error is rejected, or None."""
        if error <= self.tolerance:
            return None
        return f"wrong: relative error {error:.2e} against the reference (allowed {self.tolerance:.1e})"


def oracle(w: BatchWorkload, x: BatchInputs) -> Oracle:
    """Returns an oracle for the first, the middle, the last and the longest request."""
    longest = max(range(len(w.kv_lens)), key=w.kv_lens.__getitem__)
    rows, answers = [], []
    for request in sorted({0, len(w.kv_lens) // 2, longest, len(w.kv_lens) - 1}):
        own, o = _expected(w, x, request)
        rows.append(own + w.qo_indptr[request])
        answers.append(o)
    tolerance = FP8_TOLERANCE if w.torch_kv_dtype.itemsize == 1 else TOLERANCE[w.dtype]
    return Oracle(torch.cat(rows), torch.cat(answers), tolerance)


def _expected(w: BatchWorkload, x: BatchInputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the checked rows of one request, and the reference's output for them."""
    qo_len, kv_len = w.qo_lens[request], w.kv_lens[request]
    q, (k, v) = x.q[w.qo_indptr[request] :][:qo_len], w.tokens(x, request)
    rows = torch.tensor(checked_rows(qo_len), device=q.device)
    keep = None
    if w.causal:
        last_key = rows[:, None] + kv_len - qo_len
        keys = torch.arange(len(k), device=q.device)
        keep = keys <= last_key
        if w.window_left >= 0:
            keep &= keys >= last_key - w.window_left
    o, _ = reference.attention(q[rows], k, v, mask=reference.Mask(keep=keep), sinks=x.sinks)
    return rows, o


# ---- rows


def candidates(phase: str, backends: Sequence[str]) -> dict[str, Bind]:
    """Returns ours by backend, with index arrays on the GPU; the first again with these on the host; the XQA function
    (which needs no plan); then every peer with a kernel for the phase.
    """
    bind = peers.our_single if phase in ("prefill", "decode") else peers.ours
    ours: dict[str, Bind] = {OURS if b == "auto" else f"{OURS} {b}": partial(bind, backend=b) for b in backends}
    if bind is peers.ours and backends:
        ours[HOST_LENGTHS] = partial(bind, backend=backends[0], on_host=True)
    if phase in ("batch decode", "speculative decode"):
        ours[f"{OURS} xqa function"] = peers.our_xqa
    return {**ours, **{peer.name: peer.bind for peer in PEERS if phase in peer.phases}}


def run_row(
    w: BatchWorkload,
    binds: Mapping[str, Bind],
    timer: CudaGraphTimer,
    ceiling: Mapping[str, float],
    device: torch.device,
    l2_bytes: int,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Measures one workload and returns the record of its row."""
    sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2_bytes))]
    calls, entries = prepare(w, binds, sets)
    clock, metric = add_times(entries, calls, timer, rounds), w.metric
    for entry in entries.values():
        if "median_us" in entry:
            speed = metric.value(entry["median_us"])
            entry |= {"speed": speed, "share": speed / ceiling[metric.ceiling]}
    return {
        "name": w.name,
        "workload": asdict(w),
        "unit": metric.unit,
        "work": metric.work,
        "ceiling": metric.ceiling,
        "input_sets": len(sets),
        "sm_clock_mhz": clock,
        "candidates": entries,
        **compare_with_peers(entries),
    }


def add_times(
    entries: Mapping[str, dict[str, Any]], calls: Mapping[str, Sequence[Call]], timer: CudaGraphTimer, rounds: int
) -> int | None:
    """Adds to the entries of all calls their times, or why there are none. Returns the SM clock in MHz."""
    times, clock = measure(calls, timer, rounds)
    for name, found in times.items():
        entries[name].update(found)
    return clock


def prepare(
    w: BatchWorkload, binds: Mapping[str, Bind], sets: Sequence[BatchInputs]
) -> tuple[dict[str, list[Call]], dict[str, dict[str, Any]]]:
    """Returns the calls of the candidates with correct results, and every candidate's error or reason for exclusion."""
    truth = oracle(w, sets[0])
    calls: dict[str, list[Call]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, bind in binds.items():
        entry = entries[name] = {}
        try:
            bound = bind(w, sets)
            wrapper = getattr(getattr(bound[0], "func", None), "__self__", None)  # of a plan
            if backend := getattr(wrapper, "resolved_backend", None):  # which one of ours has
                entry["backend"] = backend
                require(name != f"{OURS} {backend}" or entries.get(OURS, {}).get("backend") != backend, SAME)
            outputs = [call() for call in bound]  # every one: lazy initialisation must not happen during a capture
            error = truth.error(outputs[0])
        except Exception as failure:  # a failing peer must not end the run
            entry["reason"] = reason(failure)
            continue
        if rejection := truth.rejection(error):
            entry["reason"] = rejection
        else:
            entry["error"] = error
            calls[name] = bound
    return calls, entries


def compare_with_peers(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the best peer and the ratio of our speed to its speed, both None if one side has no result. Our speed is
    that of "auto" if it was timed, else that of our best backend.
    """

    def best(names: Sequence[str]) -> str | None:
        timed = [name for name in names if "speed" in entries[name]]
        return max(timed, key=lambda name: entries[name]["speed"], default=None)

    ours = best([OURS] if OURS in entries else [name for name in entries if name.startswith(OURS)])
    peer = best([name for name in entries if not name.startswith(OURS)])
    ratio = entries[ours]["speed"] / entries[peer]["speed"] if ours and peer else None
    return {"best_peer": peer, "ratio": ratio}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the geometric mean of the ratios to the best peer, the lowest, and how far "auto" is from our best."""
    ratios = {row["name"]: row["ratio"] for row in rows if row["ratio"]}
    found: dict[str, Any] = {"rows": len(rows), "compared": len(ratios)}
    if ratios:
        lowest = min(ratios, key=ratios.__getitem__)
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        found |= {"mean": mean, "lowest": ratios[lowest], "lowest_row": lowest}
    auto = {}  # shares of "auto" of our best backend, with lengths on the GPU
    for row in rows:
        speeds = {name: e["speed"] for name, e in row["candidates"].items() if name.startswith(OURS) and "speed" in e}
        speeds.pop(HOST_LENGTHS, None)
        if OURS in speeds:
            auto[row["name"]] = speeds[OURS] / max(speeds.values())
    if auto:
        worst = min(auto, key=auto.__getitem__)
        found |= {"auto": auto[worst], "auto_row": worst}
    return found


def save(record: Mapping[str, Any], path: Path | None) -> None:
    """Writes a record as JSON, if there is a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
