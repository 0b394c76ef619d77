"""Runs a table of workloads: checks our backends and every peer against the reference, times them together and records
the results.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

import cute_attn
from perf import batch_peers
from perf.batch_workloads import BatchInputs, BatchWorkload
from perf.ceilings import ceilings
from perf.check import oracle
from perf.harness import ROUNDS, Call, CudaGraphTimer, Timer, measure, reason
from perf.machine import command_line, environment, why_no_gpu
from perf.optional import require
from perf.peers import PEERS, Bind
from perf.report import markdown
from perf.warm import warm
from perf.workloads import Inputs, Workload

AnyWorkload = Workload | BatchWorkload
AnyInputs = Inputs | BatchInputs

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


def main(program: str, workloads: Sequence[AnyWorkload], argv: Sequence[str] | None = None) -> int:
    """Runs the command line of `perf.<program>`, a table of workloads. Returns 0, or 2 if nothing can be measured."""
    options = parse(program, argv)
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    selected = select(workloads, options.only)
    if options.warm_peers:
        warm(selected, options.peers)
        return 0
    if not selected:
        print(f"--only must match the name of a row, got {' '.join(options.only)}.", file=sys.stderr)
        return 2
    run(program, selected, options)
    return 0


def select(workloads: Sequence[AnyWorkload], words: Sequence[str]) -> list[AnyWorkload]:
    """Returns the workloads whose names contain all of these words."""
    return [w for w in workloads if all(word in w.name.split() for text in words for word in text.split())]


def parse(program: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m perf.{program}", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every row")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="our backends to measure (default: auto)")
    parser.add_argument("--peers", nargs="*", help="peers to measure (default: all)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help='only rows whose names contain these words, as in "d128 causal"',
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of timed rounds (default {ROUNDS})")
    parser.add_argument(
        "--warm-peers", action="store_true", help="only build the peers that compile on first use, measure nothing"
    )
    return parser.parse_args(argv)


def run(program: str, workloads: Sequence[AnyWorkload], options: argparse.Namespace) -> None:
    """Measures the ceilings and every row on the current device, and prints the table."""
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    timer = CudaGraphTimer()
    record: dict[str, Any] = {
        "command": command_line(program, sys.argv[1:]),
        "environment": environment(),
        "ceilings": ceilings(timer, device),
        "rows": [],
        "failed_rows": {},
    }
    for w in workloads:
        binds = candidates(w.phase, options.backends)
        if options.peers is not None:
            binds = {n: b for n, b in binds.items() if n.startswith(OURS) or n in options.peers}
        try:
            row = run_row(w, binds, timer, record["ceilings"], device, l2_bytes, options.rounds)
        except Exception as error:  # out of memory, or a peer broke the CUDA context: earlier rows stay valid
            record["failed_rows"][w.name] = reason(error)
            print(f"{w.name}: {record['failed_rows'][w.name]}", file=sys.stderr, flush=True)
        else:
            record["rows"].append(row)
            print(progress(row), file=sys.stderr, flush=True)
        if options.out:
            save(record, options.out)
    print(markdown(record))


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
