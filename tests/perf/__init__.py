"""What tests of `perf` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perf import bench
from perf.harness import Call
from perf.peers import Bind
from perf.workloads import BatchInputs, BatchWorkload, equal

BATCHES = [  # the first two are ragged
    equal(2, 40, 40, (4, 2), 64, causal=True),
    BatchWorkload((3, 20), (50, 20), 4, 2, 64, causal=True),
    BatchWorkload((3, 20), (50, 20), 4, 2, 64, 16, causal=True),
    BatchWorkload((3, 20), (50, 20), 4, 2, 64, 16, causal=True, window_left=9, sinks=True),
    BatchWorkload((1, 1, 1), (50, 7, 16), 4, 2, 64, 16),
    BatchWorkload((1, 1, 1), (50, 7, 16), 4, 2, 64, 16, window_left=15, sinks=True),
    equal(3, 4, 50, (4, 2), 64, 16, causal=True),
    BatchWorkload((5, 3), (5, 3), 4, 2, 48, causal=True, head_dim_v=32),
]
ENVIRONMENT = dict.fromkeys(("gpu", "date", "commit", "driver", "torch", "cuda", "cudnn"), "?")


def assert_right(w: BatchWorkload, sets: Sequence[BatchInputs], calls: Sequence[Call]) -> None:
    """One call per set, as the oracle says."""
    for x, call in zip(sets, calls, strict=True):
        truth = bench.oracle(w, x)
        assert truth.rejection(truth.error(call())) is None


def our_candidates(w: BatchWorkload, *backends: str) -> Mapping[str, Bind]:
    return {name: b for name, b in bench.candidates(w.phase, backends).items() if name.startswith(bench.OURS)}
