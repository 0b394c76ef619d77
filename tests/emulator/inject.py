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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
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


def fates(faults: list[Fault], jobs: int) -> Iterator[tuple[Fault, str]]:
    """Faults, as they are tried, with what became of them: noticed, excused, or MISSED."""
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for _ in range(jobs):
            copies.put(stack.enter_context(copy()))

        def tried(fault: Fault) -> tuple[Fault, str]:
            root = copies.get()
            try:
                survived = survives(fault, root)
            finally:
                copies.put(root)
            return fault, "noticed" if not survived else "excused" if fault.excuse else "MISSED"

        for done in as_completed([pool.submit(tried, fault) for fault in faults]):
            yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose description or file holds this")
    parser.add_argument("--new", action="store_true", help="those that --out does not know")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known: dict[str, str] = {}
    if options.out is not None and options.out.exists():
        known = json.loads(options.out.read_text())["faults"]
    chosen = [fault for fault in FAULTS if options.only in f"{fault.file} {fault.what}"]
    chosen = [fault for fault in chosen if not (options.new and fault.what in known)]
    for fault, fate in fates(chosen, options.jobs):
        print(f"{fate}: {fault.file}: {fault.what}", flush=True)
        known[fault.what] = fate
        if options.out:
            kept = {one.what: known[one.what] for one in FAULTS if one.what in known}  # today's, in their order
            options.out.write_text(json.dumps({**Counter(kept.values()), "faults": kept}, indent=1) + "\n")
    tried = Counter(known[fault.what] for fault in chosen)
    print(dict(tried))
    return int("MISSED" in tried)


if __name__ == "__main__":
    raise SystemExit(main())
