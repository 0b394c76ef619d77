"""What tests of `perf` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from perf import bench
from perf.harness import Call
from perf.machine import UnavailableError
from perf.peers import Bind
from perf.workloads import BatchInputs, BatchWorkload, equal
from tests.support.dense_attention import attention, seen

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
CPU = torch.device("cpu")
CEILINGS = {"read": 4000.0, "copy": 4000.0, "gemm": 700.0}
ENVIRONMENT = dict.fromkeys(("gpu", "date", "commit", "driver", "torch", "cuda", "cudnn"), "?")


def assert_right(w: BatchWorkload, sets: Sequence[BatchInputs], calls: Sequence[Call]) -> None:
    """One call per set, as the oracle says."""
    for x, call in zip(sets, calls, strict=True):
        truth = bench.oracle(w, x)
        assert truth.rejection(truth.error(call())) is None


def our_candidates(w: BatchWorkload, *backends: str) -> Mapping[str, Bind]:
    return {name: b for name, b in bench.candidates(w.phase, backends).items() if name.startswith(bench.OURS)}


class FakeReplay(NamedTuple):
    name: str
    launches: int


class FakeTimer:
    """Timer whose launches take `speeds` (ms, by candidate), with a jitter of 0, +10 %, -10 % in turn. Candidates are
    told by the order of captures, two of each: a probe and the real one.
    """

    def __init__(self, speeds: dict[str, float]) -> None:
        self.speeds = speeds
        self.order: list[str] = []
        self.walked: list[list[Any]] = []
        self.runs = 0

    def capture(self, calls: Sequence[Callable[[], Any]], launches: int) -> FakeReplay:
        self.walked.append([calls[i % len(calls)]() for i in range(launches)])
        return FakeReplay(list(self.speeds)[(len(self.walked) - 1) // 2], launches)

    def run(self, replays: Sequence[Any]) -> list[float]:
        self.runs += 1
        jitter = (1.0, 1.1, 0.9)[self.runs % 3]
        self.order += [replay.name for replay in replays]
        return [self.speeds[replay.name] * jitter * replay.launches for replay in replays]

    def sm_clock_mhz(self, replay: Any) -> int | None:
        return 1755


def right(w: BatchWorkload, x: BatchInputs) -> torch.Tensor:
    return attention(*x[:3], seen(w.qo_lens[0], w.kv_lens[0], w.causal))[0]


ABSENT, WRONG = "absent", "wrong"


def row_of_fakes(w: BatchWorkload, candidates: Mapping[str, float | str]) -> dict[str, Any]:
    """A row whose candidates take so many ms, or are absent or wrong."""

    def bind(what: float | str, sets: Sequence[BatchInputs]) -> list[Call]:
        if what == ABSENT:
            raise UnavailableError("it is not installed")
        return [lambda x=x: right(w, x) + (what == WRONG) / 2 for x in sets]  # type: ignore[misc]

    binds = {name: lambda _, sets, what=what: bind(what, sets) for name, what in candidates.items()}
    timer = FakeTimer({name: what for name, what in candidates.items() if isinstance(what, float)})
    return bench.run_row(w, binds, timer, CEILINGS, CPU, l2_bytes=1 << 16, rounds=9)


def record_of(*rows: dict[str, Any]) -> dict[str, Any]:
    more = {"command": "python -m perf.run prefill", "environment": ENVIRONMENT, "ceilings": CEILINGS}
    return {**more, "rows": [*rows], "failed_rows": {"a long row": "OutOfMemoryError: too long"}}
