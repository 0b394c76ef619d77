"""Builds the peers that compile on first use, in parallel, to save a run minutes of waiting.

    python -m perf.prefill --warm-peers &     (likewise perf.decode)

Each peer is built in its own process, which solves a short version of the workload:
    python -m perf.warm PEER Workload '{"qo_len": 256, ...}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from perf.batch_workloads import BatchWorkload
from perf.harness import reason
from perf.optional import UnavailableError
from perf.peers import PEERS
from perf.workloads import Workload

SHORT = 256
PARALLEL_BUILDS = 10
BUILD_JOBS = "4"  # compiler processes per build

AnyWorkload = Workload | BatchWorkload
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Workload, BatchWorkload)}


def builds(workloads: Sequence[AnyWorkload], names: Sequence[str] | None = None) -> list[tuple[str, AnyWorkload]]:
    """Returns (peer, short workload) of every distinct build; masks and lengths do not change what is built."""
    short = dict.fromkeys(w.short(SHORT) for w in workloads)
    peers = [peer for peer in PEERS if peer.builds and (names is None or peer.name in names)]
    return [(peer.name, w) for w in short for peer in peers if w.phase in peer.phases]


def warm(workloads: Sequence[AnyWorkload], names: Sequence[str] | None = None) -> None:
    """Runs the builds of all peers, or of the named ones. Each prints its result; a failure does not stop others."""
    env = {"MAX_JOBS": BUILD_JOBS, **os.environ}

    def spawn(job: tuple[str, AnyWorkload]) -> None:
        name, workload = job
        subprocess.run(
            [sys.executable, "-m", "perf.warm", name, type(workload).__name__, json.dumps(asdict(workload))], env=env
        )

    with ThreadPoolExecutor(PARALLEL_BUILDS) as pool:
        list(pool.map(spawn, builds(workloads, names)))


def build(name: str, workload: AnyWorkload) -> str:
    """Binds the peer, runs it once and returns the result in words."""
    peer = next(p for p in PEERS if p.name == name and workload.phase in p.phases)
    try:
        for call in peer.bind(workload, [workload.inputs(torch.device("cuda"))]):
            call()
        torch.cuda.synchronize()
    except UnavailableError as error:
        return f"unavailable: {error}"
    except Exception as error:  # the failure of a peer is a line of the log
        return f"failed: {reason(error)}"
    return "ready"


if __name__ == "__main__":
    _, peer_name, kind, text = sys.argv
    problem = KINDS[kind](**json.loads(text))
    print(f"{peer_name}, {problem.name}: {build(peer_name, problem)}", flush=True)
