"""Builds what compiles on first use, in parallel, to save a run minutes of waiting.

    python -m perf.run anchors --warm-peers &

FlashInfer's modules take nvcc a minute or more each: one process per module, which solves a short version of the
workload. Finished ones are noted in FlashInfer's cache, so that a run with a time limit can leave out the others. Our
own kernels take seconds: some processes that share the workloads.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perf.bench import candidates
from perf.harness import reason
from perf.machine import UnavailableError
from perf.peers import PEERS
from perf.workloads import BatchWorkload

SHORT = 256
PARALLEL_BUILDS = 10
BUILD_JOBS = "4"  # compiler processes per build
MOST_PROCESSES = 12  # each has a context and the inputs of a workload on the GPU
COMPILE_SECONDS = 120.0  # after which the rows compile what is missing

Job = tuple[str, BatchWorkload]


def builds(workloads: Sequence[BatchWorkload], names: Sequence[str] | None = None) -> list[Job]:
    """Returns (peer, short workload) for every module that is built."""
    peers = [peer for peer in PEERS if peer.builds and (names is None or peer.name in names)]
    pairs = [(peer.name, w) for w in workloads for peer in peers if w.phase in peer.phases]
    found = {module_of(name, w): (name, w.short(SHORT)) for name, w in pairs}
    return sorted(found.values(), key=lambda job: job[0] != "FlashInfer fa3")  # the longest first: three minutes each


def module_of(name: str, w: BatchWorkload) -> str:
    """Returns what distinguishes FlashInfer's modules: neither masks nor lengths, and head counts for XQA alone."""
    dims = f"{w.head_dim}/{w.head_dim_vo} {w.phase}" if w.single else w.head_dim
    parts = [name, w.dtype, w.kv_dtype, f"d{dims}", "window" if w.window_left >= 0 else "no window"]
    if name == "FlashInfer XQA" and not w.single:
        parts += [f"page{w.page_size}", f"group{w.num_qo_heads // w.num_kv_heads}", f"q{max(w.qo_lens)}"]
    if w.sinks:
        parts.append("sinks")  # which most refuse: a build must not stand for one without
    return ", ".join(parts)


def warm(workloads: Sequence[BatchWorkload], names: Sequence[str] | None = None) -> None:
    """Runs the builds of all peers, or of the named ones. Each prints its result; a failure does not stop others."""
    _in_processes([[job] for job in builds(workloads, names)], PARALLEL_BUILDS)


def compile_ours(workloads: Sequence[tuple[BatchWorkload, Sequence[str]]], meanwhile: Callable[[], None]) -> None:
    """Runs each workload once with the named backends of ours, in some processes: afterwards the kernels are in the
    cache on disk. This process calls `meanwhile`.
    """
    jobs = [
        (name, w) for w, backends in workloads for name in candidates(w.phase, backends) if name.startswith("cute_attn")
    ]
    count = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1, len(jobs)))
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(_in_processes, [jobs[i::count] for i in range(count)], count, COMPILE_SECONDS)
        meanwhile()
        compiled.result()


def _in_processes(groups: Sequence[Sequence[Job]], parallel: int, limit: float | None = None) -> None:
    """Runs each group of jobs in a process of its own, which ends after `limit` seconds."""
    paths = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")  # where `perf` is, whatever the directory
    env = {"MAX_JOBS": BUILD_JOBS, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def spawn(jobs: Sequence[Job]) -> None:
        code = f"from perf import warm; warm.build_all({[(name, asdict(w)) for name, w in jobs]!r})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", code], env=env, timeout=limit)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(spawn, groups))


def build_all(jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Builds candidates for the fields of workloads, and prints the results."""
    for name, fields in jobs:
        workload = BatchWorkload(**fields)
        print(f"{name}, {workload.name}: {build(name, workload)}", flush=True)


def build(name: str, workload: BatchWorkload) -> str:
    """Binds the candidate, runs it once and returns the result in words."""
    backend = name.removeprefix("cute_attn").strip()
    try:
        backends = ("auto",) if backend in ("", "host lengths", "xqa function") else (backend,)
        for call in candidates(workload.phase, backends)[name](workload, [workload.inputs(torch.device("cuda"))]):
            call()
        torch.cuda.synchronize()
    except UnavailableError as error:
        return f"unavailable: {error}"
    except Exception as error:  # the failure of a candidate is a line of the log
        return f"failed: {reason(error)}"
    if any(peer.name == name and peer.builds for peer in PEERS):
        _note(name, workload)
    return "ready"


def built(name: str, w: BatchWorkload) -> bool:
    """Tells whether a build of this peer for such a workload has finished on this machine."""
    path = _notes()
    return path.exists() and module_of(name, w) in path.read_text().splitlines()


def _note(name: str, w: BatchWorkload) -> None:
    path = _notes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as notes:
        notes.write(module_of(name, w) + "\n")  # one write: other processes append, too


def _notes() -> Path:
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
    return Path(base) / ".cache" / "flashinfer" / "built_for_cute_attn_perf.txt"
