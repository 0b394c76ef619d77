"""Host time of planning a batch, and the quality of plans: `python -m perf.plan --out perf/results/plan.json`.

Host times are microseconds of the schedule, of its copy to the device, and of both; the copy needs a GPU. Makespans are
in the cost model's time (`perf.makespan`), next to a bound that no schedule beats and to the best of all even splits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_attn.problem import BatchLengths, BatchLimits, GraphLimits
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.batch import SchedulerParams, schedule
from perf.bench import publish
from perf.harness import Call
from perf.machine import command_line, environment, why_no_gpu
from perf.makespan import DECODE, PREFILL, lengths_of, quality, random_batches
from perf.overhead import host_time

REQUESTS = 256
BATCHES = 300  # per phase, whose makespans are simulated
LIMITS = BatchLimits(workspace_bytes=128 << 20)
Batch = tuple[BatchLengths, SchedulerParams, BatchLimits]


def batches() -> dict[str, Batch]:
    """Returns the planned batches by name: lengths, tile and limits."""
    rng = np.random.default_rng(0)
    one = np.ones(REQUESTS, np.int64)
    long, queries = rng.integers(100, 8000, REQUESTS), rng.integers(1, 2000, REQUESTS)
    graph = LIMITS._replace(graph=GraphLimits(REQUESTS, REQUESTS, 1 << 22, max_qo_len=1))
    few = lengths_of(np.ones(40, np.int64), np.full(40, 8192))
    skewed = lengths_of(one, np.where(np.arange(REQUESTS) == 100, 131072, 512))
    return {
        "decode, 256 requests of 100 to 8000 tokens": (lengths_of(one, long), DECODE, LIMITS),
        "  in a CUDA graph": (lengths_of(one, long), DECODE, graph),
        "  split every 2048 tokens": (lengths_of(one, long), DECODE, LIMITS._replace(fixed_split_size=2048)),
        "decode, 40 requests of 8192 tokens": (few, DECODE, LIMITS),
        "decode, one of 131072 among 255 of 512 tokens": (skewed, DECODE, LIMITS),
        "prefill, 256 requests of 1 to 2000 tokens": (lengths_of(queries, queries), PREFILL, LIMITS),
        "prefill, the same after 2000 to 8000 cached": (
            lengths_of(queries, queries + rng.integers(2000, 8000, REQUESTS)),
            PREFILL,
            LIMITS,
        ),
    }


def copy(staging: Staging, ints: np.ndarray) -> None:
    """Copies the records of a plan to the device."""
    staging.upload(ints)
    staging.send()


def calls(batch: Batch, staging: Staging | None) -> dict[str, Call]:
    """Returns the parts of a plan and the whole."""
    ints = schedule(*batch).ints.copy()
    parts: dict[str, Call] = {"schedule": lambda: schedule(*batch)}
    if staging is not None:
        parts["copy"] = lambda: copy(staging, ints)
        parts["both"] = lambda: copy(staging, schedule(*batch, staging.reserve).ints)
    return parts


def host_times(device: torch.device | None) -> dict[str, Any]:
    times = {}
    for name, batch in batches().items():
        for part, call in calls(batch, Staging(device) if device else None).items():
            wait = torch.cuda.synchronize if device else lambda: None
            times[f"{name}: {part}"] = host_time(call, wait, calls=20)._asdict()
            print(name, part, times[f"{name}: {part}"], file=sys.stderr, flush=True)
    return times


def makespans(count: int) -> dict[str, dict[str, list[float]]]:
    """Returns median, 90th and 99th percentile and largest value by phase and ratio."""
    found = {}
    for phase in ("decode", "prefill"):
        results = [quality(*batch) for batch in random_batches(phase, count)]
        ratios = {
            "ours / bound": [q.ours / q.bound for q in results],
            "ours / best even split": [q.ours / q.best for q in results],
            "unsplit / ours": [q.unsplit / q.ours for q in results],
        }
        found[phase] = {name: np.percentile(values, (50, 90, 99, 100)).tolist() for name, values in ratios.items()}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.plan", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help=f"number of simulated batches per phase (default {BATCHES})"
    )
    options = parser.parse_args(argv)
    device = None if why_no_gpu() else torch.device("cuda", torch.cuda.current_device())
    record = {
        "command": command_line("plan", sys.argv[1:]),
        "environment": environment(),
        "makespan": makespans(options.batches),
        "overhead": host_times(device),
    }
    publish(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
