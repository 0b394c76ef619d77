"""A row: our backends and every peer, checked against the reference and timed together, and its record."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

import cute_attn
from perf import batch_peers
from perf.check import oracle
from perf.harness import ROUNDS, Call, Timer, measure, reason
from perf.machine import require
from perf.peers import PEERS, Bind
from perf.report import markdown
from perf.workloads import AnyInputs, AnyWorkload, Inputs, Workload

OURS = "cute_attn"  # prefix of the names of our candidates
HOST_LENGTHS = f"{OURS} host lengths"
SAME = "it is what auto runs"


def bind_ours(backend: str, w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    """Binds the public functions for single requests."""
    if w.phase == "prefill":
        prefill = cute_attn.single_prefill_with_kv_cache
        return [functools.partial(prefill, *x, causal=w.causal, backend=backend) for x in sets]

    def decode(x: Inputs) -> torch.Tensor:
        o = cute_attn.single_decode_with_kv_cache(x.q[0], x.k, x.v, backend=backend)
        return cast(torch.Tensor, o)[None]

    return [functools.partial(decode, x) for x in sets]


def candidates(phase: str, backends: Sequence[str]) -> dict[str, Bind]:
    """Returns ours by backend, with index arrays on the GPU; the first again with these on the host; the XQA function
    (which needs no plan); then every peer with a kernel for the phase.
    """
    bind = bind_ours if phase in ("prefill", "decode") else batch_peers.ours
    ours: dict[str, Bind] = {OURS if b == "auto" else f"{OURS} {b}": functools.partial(bind, b) for b in backends}
    if bind is batch_peers.ours and backends:
        ours[HOST_LENGTHS] = functools.partial(bind, backends[0], on_host=True)
    if phase in ("batch decode", "speculative decode"):
        ours[f"{OURS} xqa function"] = batch_peers.our_xqa
    return {**ours, **{peer.name: peer.bind for peer in PEERS if phase in peer.phases}}


def run_row(
    w: AnyWorkload,
    binds: Mapping[str, Bind],
    timer: Timer,
    ceiling: Mapping[str, float],
    device: torch.device,
    l2_bytes: int,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Measures one workload and returns the record of its row."""
    sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2_bytes))]
    calls, entries = prepare(w, binds, sets)
    measured = measure(calls, timer, rounds)
    metric = w.metric
    for name, timing in measured.timings.items():
        if isinstance(timing, str):
            entries[name]["reason"] = timing
            continue
        speed = metric.value(timing.median_us)
        entries[name].update(timing._asdict(), speed=speed, share=speed / ceiling[metric.ceiling])
    return {
        "name": w.name,
        "workload": asdict(w),
        "unit": metric.unit,
        "work": metric.work,
        "ceiling": metric.ceiling,
        "input_sets": len(sets),
        "sm_clock_mhz": measured.sm_clock_mhz,
        "candidates": entries,
        **compare_with_peers(entries),
    }


def prepare(
    w: AnyWorkload, binds: Mapping[str, Bind], sets: Sequence[AnyInputs]
) -> tuple[dict[str, list[Call]], dict[str, dict[str, Any]]]:
    """Returns the calls of the candidates with correct results, and every candidate's error or reason for exclusion."""
    truth = oracle(w, sets[0])
    calls: dict[str, list[Call]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, bind in binds.items():
        entry = entries[name] = {}
        try:
            bound = bind(w, sets)
            if backend := planned_backend(bound):
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


def planned_backend(calls: Sequence[Call]) -> str | None:
    """Returns the backend that the plan of one of our wrappers chose; None for other calls."""
    owner = getattr(getattr(calls[0], "func", None), "__self__", None)
    return getattr(owner, "resolved_backend", None)


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
    """Returns the geometric mean of the ratios to the best peer, the lowest, how far "auto" is from our best, and how
    far lengths on the GPU are from lengths on the host.
    """
    ratios = {row["name"]: row["ratio"] for row in rows if row["ratio"]}
    found: dict[str, Any] = {"rows": len(rows), "compared": len(ratios)}
    if ratios:
        lowest = min(ratios, key=ratios.__getitem__)
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        found |= {"mean": mean, "lowest": ratios[lowest], "lowest_row": lowest}
    auto, device = {}, {}  # shares of "auto", with lengths on the GPU: of our best backend, and of lengths on the host
    for row in rows:
        speeds = {name: e["speed"] for name, e in row["candidates"].items() if name.startswith(OURS) and "speed" in e}
        if OURS not in speeds:
            continue
        if HOST_LENGTHS in speeds:
            device[row["name"]] = speeds[OURS] / speeds.pop(HOST_LENGTHS)
        auto[row["name"]] = speeds[OURS] / max(speeds.values())
    for shares, share_name, row_name in ((auto, "auto", "auto_row"), (device, "device_lengths", "device_row")):
        if shares:
            worst = min(shares, key=shares.__getitem__)
            found |= {share_name: shares[worst], row_name: worst}
    return found


def progress(row: Mapping[str, Any]) -> str:
    """Returns one row as one line of text."""
    cells = []
    for name, entry in row["candidates"].items():
        cells.append(f"{name} {entry['speed']:.1f}" if "speed" in entry else f"{name} - ({entry['reason']})")
    return f"{row['name']} [{row['unit']}]: " + ", ".join(cells)


def save(record: Mapping[str, Any], path: Path) -> None:
    """Writes a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def publish(record: Mapping[str, Any], path: Path | None) -> None:
    """Writes a record to `path`, if that is given, and prints its tables."""
    if path:
        save(record, path)
    print(markdown(record))
