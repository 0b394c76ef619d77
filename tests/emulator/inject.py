"""Injects faults into the kernels' sources, one at a time, and reports whether the tests that should detect them do.

    python -m tests.emulator.inject [--only WORD] [--jobs 2] [--out tests/emulator/faults.json]

Tests run in a copy of the project with a kernel cache of its own.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def report(faults: list[Fault], jobs: int) -> dict[str, object]:
    """Every fault's fate, and how many there are of each."""
    rows: list[dict[str, str]] = []
    with copy() as first, copy() as second, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for root in (first, second)[:jobs]:
            copies.put(root)

        def fate(fault: Fault) -> dict[str, str]:
            root = copies.get()
            try:
                survived = survives(fault, root)
            finally:
                copies.put(root)
            verdict = "noticed" if not survived else "excused" if fault.excuse else "MISSED"
            print(f"{verdict}: {fault.file}: {fault.what}", flush=True)
            row = {"file": fault.file, "fault": fault.what, "verdict": verdict}
            return row | ({"excuse": fault.excuse} if fault.excuse else {})

        rows += pool.map(fate, faults)
    counts = {name: sum(row["verdict"] == name for row in rows) for name in ("noticed", "excused", "MISSED")}
    return {**counts, "faults": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose description or file holds this")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = report([f for f in FAULTS if options.only in f"{f.file} {f.what}"], options.jobs)
    print({name: count for name, count in found.items() if name != "faults"})
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["MISSED"]))


if __name__ == "__main__":
    raise SystemExit(main())
