"""What the programs of `perf` share: options, the GPU, the head of a record, rows of calls beside peers'."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perf.bench import add_times, save
from perf.harness import ROUNDS, Call, CudaGraphTimer, ceilings, reason
from perf.machine import environment, require, why_no_gpu

CACHED_BYTES = 160 << 20  # of all copies together: beyond twice an H200's L2 of 50 MiB, and B200's of 126 MB
UNITS = {"gb_per_s": "{:.0f} GB/s", "tflops": "{:.0f} TFLOP/s", "speedup": "{:.2f}x"}
Row = dict[str, Any]


def parser(name: str, about: str | None, rounds: int = 0) -> argparse.ArgumentParser:
    """Returns the options that a program has besides its own; `rounds`: the default, 0 where nothing has rounds."""
    found = argparse.ArgumentParser(prog=f"python -m perf.{name}", description=about)
    found.add_argument("--out", type=Path, help="JSON file for the record, written whenever there is more of it")
    if rounds:
        found.add_argument("--rounds", type=int, default=rounds, help=f"number of timed rounds (default {rounds})")
    return found


def gpu(package: str = "torch", count: int = 1) -> torch.device:
    """Returns the current GPU; ends the program with 2, and the reason on stderr, without `count` of them or without
    a `package` that it needs.
    """
    absent = why_no_gpu()
    if importlib.util.find_spec(package) is None:
        absent = absent or f"{package} is not installed"
    elif (found := torch.cuda.device_count()) < count:
        absent = absent or f"torch sees {found} of {count} GPUs"
    if absent:
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        raise SystemExit(2)
    return torch.device("cuda", torch.cuda.current_device())


def head(name: str, argv: Sequence[str] | None = None, **more: str) -> Row:
    """Returns what a record begins with: its command and environment, with `more` of that."""
    command = ["python -m", f"perf.{name}", *(sys.argv[1:] if argv is None else argv)]
    return {"command": " ".join(command), "environment": environment() | more}


def in_process(module: str, asked: Any, env: Mapping[str, str], limit: float, lines: int = 40) -> Row:
    """Returns what `measure(asked)` of a module of `perf` returns in a fresh process; or the reason why there is none,
    with the last `lines` that it printed.

    The process leaves it in a file: others that it starts may hold its pipes. They end with it.
    """
    with tempfile.TemporaryDirectory(prefix="cute_attn-perf-") as name:
        found, log = Path(name) / "found.json", Path(name) / "log"
        leave = f"pathlib.Path({str(found)!r}).write_text(json.dumps({module}.measure({asked!r})))"
        code = f"import json, os, pathlib; from perf import {module}; {leave}; os._exit(0)"  # an engine's end may hang
        with log.open("w") as out, subprocess.Popen(
            [sys.executable, "-c", code], stdout=out, stderr=out, env={**os.environ, **env}, start_new_session=True
        ) as process:  # fmt: skip
            try:
                process.wait(limit)
                why = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                why = f"not finished after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # nvcc, an engine: not beside the next process
                    os.killpg(process.pid, signal.SIGKILL)
        if found.exists():
            return dict(json.loads(found.read_text()))
        told = "\n".join(log.read_text().splitlines()[-lines:])
        return {"reason": f"{why}: {told}"}


# ---- rows of calls, for problems that `perf.bench` has no words for


def copies(num_bytes: int) -> int:
    """Returns how many copies of the inputs exceed the L2."""
    return max(2, -(-CACHED_BYTES // num_bytes))


def difference(found: torch.Tensor, want: torch.Tensor, allowed: float, to: str) -> float:
    """Returns the relative difference in norm; raises `UnavailableError` if it is more than is allowed."""
    error = float((found.double() - want).norm() / want.norm())
    require(error <= allowed, f"wrong: relative difference {error:.2e} to {to}")
    return error


def beside(
    w: Any,
    work: Mapping[str, float],
    makes: Mapping[str, Callable[[Any], Call]],
    sets: Sequence[Any],
    check: Callable[..., Row],
    rounds: int,
) -> Row:
    """Returns the record of a row: the times of all candidates, or why there are none.

    `w`: a dataclass with `name`. `work`: by unit what a call that takes 1 us reaches. `check(name, call)` runs a call
    on the first set; it returns entries of the record, or raises.
    """
    calls: dict[str, Sequence[Call]] = {}
    entries: dict[str, Row] = {}
    for name, make in makes.items():
        try:
            made = [make(x) for x in sets]
            entries[name], calls[name] = check(name, made[0]), made
        except Exception as failure:  # a failing peer must not end the run
            entries[name] = {"reason": reason(failure)}
    clock = add_times(entries, calls, CudaGraphTimer(), rounds)
    for entry in entries.values():
        if "median_us" in entry:
            entry |= {unit: of_one_us / entry["median_us"] for unit, of_one_us in work.items()}
    row = {"name": w.name, "workload": asdict(w), "copies": len(sets)}
    return {**row, "candidates": entries, "sm_clock_mhz": clock}


def line(row: Row) -> str:
    """Returns one row as a line of text."""
    units = {**UNITS, "speed": "{:.1f} " + row.get("unit", "")}
    cells = []
    for name, entry in row["candidates"].items():
        speeds = "".join(f", {text.format(entry[unit])}" for unit, text in units.items() if unit in entry)
        timed = "median_us" in entry
        cells.append(f"{name} {entry['median_us']:.2f} us{speeds}" if timed else f"{name} - ({entry['reason']})")
    return f"{row['name']}: {'; '.join(cells)}"


def measure_rows(
    name: str, about: str | None, workloads: Sequence[Any], measured: Callable[[Any, torch.device, int], Row]
) -> None:
    """Runs a command line that measures rows of calls, beside the ceilings."""
    options, device = parser(name, about, ROUNDS).parse_args(), gpu()
    record: Row = {**head(name), "ceilings": ceilings(CudaGraphTimer(), device), name: []}
    for w in workloads:
        record[name].append(measured(w, device, options.rounds))
        print(line(record[name][-1]), flush=True)
        save(record, options.out)
