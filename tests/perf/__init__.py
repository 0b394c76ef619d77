"""What tests of `perf` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perf import bench
from perf.harness import Call
from perf.peers import Bind
from perf.workloads import BatchInputs, BatchWorkload

ENVIRONMENT = dict.fromkeys(("gpu", "date", "commit", "driver", "torch", "cuda", "cudnn"), "?")


def assert_right(w: BatchWorkload, sets: Sequence[BatchInputs], calls: Sequence[Call]) -> None:
    """One call per set, as the oracle says."""
    for x, call in zip(sets, calls, strict=True):
        truth = bench.oracle(w, x)
        assert truth.rejection(truth.error(call())) is None


def our_candidates(w: BatchWorkload, *backends: str) -> Mapping[str, Bind]:
    return {name: b for name, b in bench.candidates(w.phase, backends).items() if name.startswith(bench.OURS)}
