"""Injects faults into the kernels' sources, one at a time, and reports whether the tests that should detect them do.

    python -m tests.emulator.inject [--only WORD] [--new] [--jobs 2] [--out tests/emulator/faults.json]

Tests run in a copy of the project with a kernel cache of its own. `--out` is written after every fault, and what it
holds of others is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tests.emulator.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
KERNELS = Path("cute_attn", "kernels")
PARTS = ("cute_attn", "tests", "perf", "pyproject.toml")
NOTICED, SURVIVED = 1, 0  # exit codes of pytest


@contextmanager
def copy() -> Iterator[Path]:
    """The project as a directory of its own."""
    with tempfile.TemporaryDirectory() as name:
        skip = shutil.ignore_patterns("__pycache__", "goldens", "results")
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, Path(name, part), ignore=skip)
            else:
                shutil.copy(ROOT / part, name)
        yield Path(name)


def survives(fault: Fault, root: Path) -> bool:
    """Whether the fault's tests pass in the copy at `root`, which is left as it was."""
    file = root / KERNELS / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, fault
    file.write_text(text.replace(fault.old, fault.new))
    try:
        done = run(root, fault.tests)
    finally:
        file.write_text(text)
    if done.returncode not in (NOTICED, SURVIVED):
        raise RuntimeError(f"{fault.what}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == SURVIVED


def run(root: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CUTE_ATTN_"))}
    environment = {**kept, "PYTHONPATH": str(root), "CUTE_ATTN_CACHE_DIR": str(root / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


Row = dict[str, str]


def name_of(row: Row | Fault) -> tuple[str, str]:
    return (row.file, row.what) if isinstance(row, Fault) else (row["file"], row["fault"])


def report(faults: list[Fault], jobs: int, watch: Callable[[Row], None]) -> None:
    """Call `watch` with the fate of every fault."""
    with copy() as first, copy() as second, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for root in (first, second)[:jobs]:
            copies.put(root)

        def fate(fault: Fault) -> Row:
            root = copies.get()
            try:
                survived = survives(fault, root)
            finally:
                copies.put(root)
            verdict = "noticed" if not survived else "excused" if fault.excuse else "MISSED"
            row = {"file": fault.file, "fault": fault.what, "verdict": verdict}
            return row | ({"excuse": fault.excuse} if fault.excuse else {})

        for done in as_completed([pool.submit(fate, fault) for fault in faults]):
            watch(done.result())


def record(rows: list[Row]) -> dict[str, object]:
    """The fates of today's faults in their order, and how many there are of each."""
    order = [name_of(fault) for fault in FAULTS]
    kept = sorted((row for row in rows if name_of(row) in order), key=lambda row: order.index(name_of(row)))
    counts = {name: sum(row["verdict"] == name for row in kept) for name in ("noticed", "excused", "MISSED")}
    return {**counts, "faults": kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose description or file holds this")
    parser.add_argument("--new", action="store_true", help="those that --out does not know")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: dict[tuple[str, str], Row] = {}
    if options.out is not None and options.out.exists():
        rows = {name_of(row): row for row in json.loads(options.out.read_text())["faults"]}
    chosen = [fault for fault in FAULTS if options.only in f"{fault.file} {fault.what}"]
    chosen = [fault for fault in chosen if not (options.new and name_of(fault) in rows)]

    def watch(row: Row) -> None:
        print(f"{row['verdict']}: {row['file']}: {row['fault']}", flush=True)
        rows[name_of(row)] = row
        if options.out:
            options.out.write_text(json.dumps(record(list(rows.values())), indent=1) + "\n")

    report(chosen, options.jobs, watch)
    verdicts = [rows[name_of(fault)]["verdict"] for fault in chosen]
    print({verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))})
    return int("MISSED" in verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
