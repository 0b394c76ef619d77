"""Runs sections of workloads under a limit of time: our backends and the peers in one process, checked before timed.

Every row is written when it is measured, so that a run that is stopped keeps what it has. Our kernels are compiled
first, by several processes. FlashInfer's modules are never built here: `--warm-peers` does that, before.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cute_attn.cli.terminal import ProgressBar
from perf.bench import OURS, AnyWorkload, candidates, progress, run_row, save, select
from perf.ceilings import ceilings
from perf.harness import ROUNDS, Call, CudaGraphTimer, reason
from perf.machine import command_line, environment, why_no_gpu
from perf.optional import UnavailableError
from perf.peers import PEERS, Bind
from perf.report import markdown
from perf.warm import built, compile_ours, warm

# Without the slower of two kernels of one library: torch's flash-attention 2 and FlashInfer's decode of one request.
PEER_NAMES = ("torch cuDNN", "flash-attn-4", "FlashInfer fa2", "FlashInfer fa3", "FlashInfer XQA")
FEWEST_ROUNDS = 5
DECODE_BACKENDS = ("auto", "fa2", "xqa")
Row = dict[str, Any]


class Section(NamedTuple):
    """Rows that are summarised together. `backends`: ours that are measured."""

    workloads: Sequence[AnyWorkload]
    backends: tuple[str, ...] = ("auto",)


class Pace:
    """Number of rounds of the next row, such that all rows fit into the budget (seconds; None: no limit)."""

    def __init__(
        self, rows: int, rounds: int, budget: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.left, self.rounds, self.clock = rows, rounds, clock
        self.deadline = None if budget is None else clock() + budget
        self.costs: list[float] = []  # seconds of each row at all rounds

    def next(self) -> int:
        """Returns the rounds of the next row, and 0 once the budget is spent."""
        if self.deadline is None:
            return self.rounds
        remaining = self.deadline - self.clock()
        if remaining <= 0:
            return 0
        expected = statistics.fmean(self.costs) * self.left if self.costs else 0.0
        return self.rounds if expected <= remaining else max(FEWEST_ROUNDS, int(self.rounds * remaining / expected))

    def finished(self, seconds: float, rounds: int) -> None:
        """Counts a row that took `seconds` with this number of rounds."""
        self.left -= 1
        self.costs.append(seconds * self.rounds / rounds)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the geometric mean of the ratios to the best peer, the lowest, and how far "auto" is from our best."""
    ratios = {row["name"]: row["ratio"] for row in rows if row["ratio"]}
    found: dict[str, Any] = {"rows": len(rows), "compared": len(ratios)}
    if ratios:
        lowest = min(ratios, key=ratios.__getitem__)
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        found |= {"mean": mean, "lowest": ratios[lowest], "lowest_row": lowest}
    shares = {row["name"]: share for row in rows if (share := _share_of_auto(row["candidates"]))}
    if shares:
        worst = min(shares, key=shares.__getitem__)
        found |= {"auto": shares[worst], "auto_row": worst}
    return found


def _share_of_auto(entries: Mapping[str, Mapping[str, Any]]) -> float | None:
    speeds = {name: e["speed"] for name, e in entries.items() if name.startswith(OURS) and "speed" in e}
    return speeds[OURS] / max(speeds.values()) if OURS in speeds else None


def _without_builds(name: str, bind: Bind) -> Bind:
    """Returns a bind that refuses a workload for which this peer's module has not been built."""

    def bound(w: AnyWorkload, sets: Sequence[Any]) -> list[Call]:
        if not built(name, w):
            raise UnavailableError("not built; --warm-peers builds it")
        return bind(w, sets)

    return bound


def chosen_binds(w: AnyWorkload, backends: Sequence[str], peers: Sequence[str]) -> dict[str, Bind]:
    """Returns ours and the named peers that have a kernel for the workload's phase."""
    builders = {peer.name for peer in PEERS if peer.builds}
    found = candidates(w.phase, backends)
    kept = {name: bind for name, bind in found.items() if name.startswith(OURS) or name in peers}
    return {name: _without_builds(name, bind) if name in builders else bind for name, bind in kept.items()}


def parse(
    program: str, about: str | None, sections: Mapping[str, Section], rounds: int, argv: Sequence[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m perf.{program}", description=about)
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every row")
    parser.add_argument(
        "--only", nargs="+", choices=sections, metavar="SECTION", help=f"sections to run: {', '.join(sections)}"
    )
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="rows whose names contain these words")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="fewer rounds where time gets short")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds of a row (default {rounds})")
    parser.add_argument("--peers", nargs="*", default=PEER_NAMES, help=f"default: {', '.join(PEER_NAMES)}")
    parser.add_argument("--warm-peers", action="store_true", help="only build FlashInfer's modules, measure nothing")
    return parser.parse_args(argv)


def main(
    program: str,
    about: str | None,
    sections: Mapping[str, Section],
    argv: Sequence[str] | None = None,
    default: Sequence[str] | None = None,
    rounds: int = ROUNDS,
) -> int:
    """Runs the command line of `perf.<program>`. `default`: sections without `--only`, else all of them. `rounds`: of
    a row without `--rounds`.

    Returns 0, or 2 if nothing can be measured.
    """
    options = parse(program, about, sections, rounds, argv)
    names = options.only or default or sections
    chosen = {name: sections[name]._replace(workloads=select(sections[name].workloads, options.rows)) for name in names}
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    workloads = [w for section in chosen.values() for w in section.workloads]
    if not workloads:
        print(f"--rows must match the name of a row, got {' '.join(options.rows)}.", file=sys.stderr)
        return 2
    if options.warm_peers:
        warm(workloads, options.peers)
        return 0
    record = run(program, chosen, options)
    print(markdown(record))
    return 0


def run(program: str, sections: Mapping[str, Section], options: argparse.Namespace) -> Row:
    """Measures the ceilings and every row on the current device, and returns the record."""
    began = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    compile_ours([(w, section.backends) for section in sections.values() for w in section.workloads])
    timer = CudaGraphTimer()
    record: Row = {
        "command": command_line(program, sys.argv[1:]),
        "environment": environment(),
        "ceilings": ceilings(timer, device),
        "summary": {},
        "rows": [],
        "failed_rows": {},
    }
    jobs = [(name, section.backends, w) for name, section in sections.items() for w in section.workloads]
    budget = None if options.budget is None else options.budget - (time.monotonic() - began)
    pace = Pace(len(jobs), options.rounds, budget)
    with ProgressBar(len(jobs)) as bar:
        for name, backends, w in jobs:
            start, rounds = time.monotonic(), pace.next()
            if rounds:
                binds = chosen_binds(w, backends, options.peers)
                machine = timer, record["ceilings"], device, l2_bytes
                _measure(record, name, w, functools.partial(run_row, w, binds, *machine, rounds))
                pace.finished(time.monotonic() - start, rounds)
            else:
                record["failed_rows"][f"{name}: {w.name}"] = f"the budget of {options.budget:.0f} s was spent"
            record["seconds"] = round(time.monotonic() - began, 1)
            if options.out:
                save(record, options.out)
            bar.step(w.name)
    return record


def _measure(record: Row, section: str, w: AnyWorkload, row_of: Callable[[], Row]) -> None:
    """Adds the row, or the reason why there is none, and the summary of its section."""
    try:
        row = {"section": section, **row_of()}
    except Exception as error:  # out of memory, or a peer broke the CUDA context: earlier rows stay valid
        record["failed_rows"][f"{section}: {w.name}"] = reason(error)
        print(f"{w.name}: {reason(error)}", file=sys.stderr, flush=True)
        return
    record["rows"].append(row)
    record["summary"][section] = summary([r for r in record["rows"] if r["section"] == section])
    if not sys.stderr.isatty():
        print(progress(row), file=sys.stderr, flush=True)
