"""Measures sections of rows under a limit of time: `python -m perf.run anchors --out perf/results/anchors.json`.

Our backends and the peers run in one process, checked before timed. Every row is written when it is measured, so that a
run that is stopped keeps what it has. Our kernels are compiled first, by several processes. FlashInfer's modules are
never built here: `--warm-peers` does that, before. Rows: `perf/rows.py`.

"random" draws rows of serving workloads that nobody tuned for: tune by the rows of one `--seed` and judge by those of
another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cute_attn.cli.terminal import ProgressBar
from perf import program
from perf.bench import OURS, candidates, run_row, save, summary
from perf.harness import ROUNDS, Call, CudaGraphTimer, ceilings, reason
from perf.machine import UnavailableError, flashinfer, module
from perf.peers import PEERS, Bind
from perf.report import markdown
from perf.rows import CURVE_ROUNDS, GROUPS, RANDOM_NAMES, SECTIONS, Section, random_sections
from perf.warm import built, compile_ours, warm
from perf.workloads import BatchWorkload

# Without the slower of two kernels of one library: torch's flash-attention 2 and FlashInfer's decode of one request.
PEER_NAMES = ("torch cuDNN", "cuDNN fp8", "flash-attn-4", "FlashInfer fa2", "FlashInfer fa3", "FlashInfer XQA")
FEWEST_ROUNDS = 5
SPENT = "was spent"
RANDOM = "random"
Row = dict[str, Any]
More = Callable[[BatchWorkload], Mapping[str, Bind]]  # further candidates of a row, by name


class Pace:
    """Number of rounds of the next row, such that all rows fit into the budget (seconds; None: no limit).

    `rounds`: those that each row should have; rows share the time in proportion to them.
    """

    def __init__(
        self, rounds: Sequence[int], budget: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.left, self.clock = list(rounds), clock
        self.deadline = None if budget is None else clock() + budget
        self.costs: list[tuple[float, float]] = []  # of each row: seconds of a round, and seconds of all else

    def next(self) -> int:
        """Returns the rounds of the next row, and 0 once the budget is spent."""
        remaining = math.inf if self.deadline is None else self.deadline - self.clock()
        if remaining <= 0:
            return 0
        if not self.costs or self.deadline is None:
            return self.left[0]
        # Medians: the first row of a kernel also compiles, which says nothing of those to come.
        per_round, fixed = (statistics.median(costs) for costs in zip(*self.costs, strict=True))
        possible = (remaining * self.left[0] / sum(self.left) - fixed) / max(per_round, 1e-6)
        return max(FEWEST_ROUNDS, min(self.left[0], int(possible)))

    def finished(self, seconds: float, rounds: int, per_round: float) -> None:
        """Counts a row that took `seconds`, of which each of its rounds `per_round`."""
        self.left.pop(0)
        self.costs.append((per_round, seconds - rounds * per_round))


def seconds_of_round(row: Mapping[str, Any]) -> float:
    """Returns how long one replay of every candidate takes."""
    timed = [entry for entry in row["candidates"].values() if "median_us" in entry]
    return float(sum(entry["median_us"] * entry["launches"] for entry in timed)) / 1e6


def _without_builds(name: str, bind: Bind) -> Bind:
    """Returns a bind that refuses a workload for which this peer's module has not been built."""

    def bound(w: BatchWorkload, sets: Sequence[Any]) -> list[Call]:
        if not built(name, w):
            raise UnavailableError("not built; --warm-peers builds it")
        return bind(w, sets)

    return bound


def chosen_binds(w: BatchWorkload, backends: Sequence[str], peers: Sequence[str]) -> dict[str, Bind]:
    """Returns ours and the named peers that have a kernel for the workload's phase."""
    builders = {peer.name for peer in PEERS if peer.builds}
    found = candidates(w.phase, backends)
    kept = {name: bind for name, bind in found.items() if name.startswith(OURS) or name in peers}
    return {name: _without_builds(name, bind) if name in builders else bind for name, bind in kept.items()}


def chosen_sections(names: Sequence[str], words: Sequence[str], seed: int) -> dict[str, Section]:
    """Returns the sections that are named, alone or in groups, with the rows whose names contain all of the words."""
    every = {**SECTIONS, **(random_sections(seed) if {RANDOM, *RANDOM_NAMES} & {*names} else {})}
    groups = {**GROUPS, RANDOM: RANDOM_NAMES}
    flat = dict.fromkeys(section for name in names for section in groups.get(name, [name]))
    return {name: every[name]._replace(workloads=select(every[name].workloads, words)) for name in flat}


def select(workloads: Sequence[BatchWorkload], words: Sequence[str]) -> list[BatchWorkload]:
    """Returns the workloads whose names contain all of these words."""
    return [w for w in workloads if all(word in w.name.split() for text in words for word in text.split())]


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns the options of a program that measures rows."""
    sections = [*GROUPS, RANDOM, *RANDOM_NAMES, *SECTIONS]
    found = program.parser(name, about)
    found.add_argument(
        "--rounds", type=int, help=f"number of timed rounds (default {ROUNDS}, {CURVE_ROUNDS} of curves)"
    )
    found.add_argument("sections", nargs="+", choices=sections, metavar="SECTION", help=f"rows: {', '.join(sections)}")
    found.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="rows whose names contain these words")
    found.add_argument("--backends", nargs="+", help="our backends to measure (default: those of the section)")
    found.add_argument("--peers", nargs="*", default=PEER_NAMES, help=f"default: {', '.join(PEER_NAMES)}")
    found.add_argument("--budget", type=float, metavar="SECONDS", help="fewer rounds where time gets short")
    found.add_argument("--seed", type=int, default=0, help="of the rows that are drawn (default 0)")
    found.add_argument("--resume", action="store_true", help="continue the record of --out, after a run was stopped")
    found.add_argument("--warm-peers", action="store_true", help="only build FlashInfer's modules, measure nothing")
    return found


def measured_sections(options: argparse.Namespace) -> dict[str, Section]:
    """Returns the sections that the options choose; ends the program with 2 if nothing can be measured."""
    chosen = chosen_sections(options.sections, options.rows, options.seed)
    if options.backends:
        chosen = {name: section._replace(backends=tuple(options.backends)) for name, section in chosen.items()}
    program.gpu()
    if not any(section.workloads for section in chosen.values()):
        print(f"--rows must match the name of a row, got {' '.join(options.rows)}.", file=sys.stderr)
        raise SystemExit(2)
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = parser("run", __doc__).parse_args(argv)
    chosen = measured_sections(options)
    if options.warm_peers:
        warm([w for section in chosen.values() for w in section.workloads], options.peers)
    else:
        print(markdown(run("run", chosen, options)))


def run(name: str, sections: Mapping[str, Section], options: argparse.Namespace, more: More = lambda w: {}) -> Row:
    """Measures the ceilings and every row on the current device, and returns the record. `more`: candidates besides
    ours and the peers.
    """
    began = time.monotonic()
    warnings.filterwarnings("ignore", message="Argument aux_data")  # flash-attn-4's, at every compile
    device = torch.device("cuda", torch.cuda.current_device())
    jobs = [(key, section, w) for key, section in sections.items() for w in section.workloads]
    if options.resume and options.out.exists():
        record: Row = json.loads(options.out.read_text())
        record["failed_rows"] = {key: why for key, why in record["failed_rows"].items() if not why.endswith(SPENT)}
        began -= record["seconds"]
    else:
        compile_ours([(w, section.backends) for _, section, w in jobs], meanwhile=import_peers)
        record = {
            **program.head(name),
            "ceilings": ceilings(CudaGraphTimer(), device),
            "summary": {},
            "rows": [],
            "failed_rows": {},
            "broke": {},
            "seconds": 0.0,
        }
    done = {(row["section"], row["name"]) for row in record["rows"]}
    failed = record["failed_rows"]
    jobs = [job for job in jobs if (job[0], job[2].name) not in done and key_of(job[0], job[2]) not in failed]
    budget = None if options.budget is None else options.budget + began - time.monotonic()
    pace = Pace([options.rounds or section.rounds for _, section, _ in jobs], budget)
    with ProgressBar(len(jobs)) as bar:
        for name, section, w in jobs:
            if rounds := pace.next():
                start = time.monotonic()
                binds = {**chosen_binds(w, section.backends, options.peers), **more(w)}
                row = _measured(record, name, w, binds, rounds)
                pace.finished(time.monotonic() - start, rounds, seconds_of_round(row) if row else 0.0)
            else:
                failed[key_of(name, w)] = f"the budget of {options.budget:.0f} s {SPENT}"
            record["seconds"] = round(time.monotonic() - began, 1)
            if options.out:
                save(record, options.out)
                if context_is_broken():
                    start_again()
            bar.step(w.name)
    return record


def key_of(section: str, w: BatchWorkload) -> str:
    return f"{section}: {w.name}"


def import_peers() -> None:
    """Imports what takes seconds, while other processes compile."""
    for load, name in ((module, "flash_attn.cute"), (flashinfer, "flashinfer")):
        with contextlib.suppress(Exception):  # each row says what is wrong with a peer
            load(name)


def _measured(record: Row, section: str, w: BatchWorkload, binds: Mapping[str, Bind], rounds: int) -> Row | None:
    """Adds the row, or the reason why there is none, and the summary of its section. Returns the row."""
    key, device = key_of(section, w), torch.device("cuda", torch.cuda.current_device())
    broke = record["broke"].get(key, [])
    harmless = {name: bind for name, bind in binds.items() if name not in broke}
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    try:
        row = {
            "section": section,
            **run_row(w, harmless, CudaGraphTimer(), record["ceilings"], device, l2_bytes, rounds),
        }
    except Exception as error:  # out of memory, or a peer broke the CUDA context: earlier rows stay valid
        record["failed_rows"][key] = reason(error)
        print(f"{w.name}: {reason(error)}", file=sys.stderr, flush=True)
        return None
    if context_is_broken():
        failed = next((name for name, e in row["candidates"].items() if "CUDA" in e.get("reason", "")), "")
        record["broke"][key] = [*broke, failed]
        return None
    row["candidates"] |= {name: {"reason": "it broke the CUDA context"} for name in broke}
    record["rows"].append(row)
    record["summary"][section] = summary([r for r in record["rows"] if r["section"] == section])
    if not sys.stderr.isatty():
        print(program.line(row), file=sys.stderr, flush=True)
    return row


def context_is_broken() -> bool:
    """Tells whether a kernel has failed, after which this process can launch nothing more."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def start_again() -> None:
    """Replaces this process by one that continues the record."""
    print("The CUDA context is broken; a new process continues.", file=sys.stderr, flush=True)
    again = [argument for argument in sys.orig_argv[1:] if argument != "--resume"]
    os.execv(sys.executable, [sys.executable, *again, "--resume"])


if __name__ == "__main__":
    main()
