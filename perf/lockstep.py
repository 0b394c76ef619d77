"""Timing of calls that all ranks of a process group make together.

A call starts on all ranks at once, behind a barrier; its time is that of the slowest rank, unless a candidate says
otherwise. Candidates alternate within a round, in an order that all ranks share.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from perf.harness import Timing, timing

Call = Callable[[], Any]

WARM_ROUNDS = 3


class Candidate(NamedTuple):
    """A call, and how it is timed."""

    call: Call
    launches: int = 1  # calls that are timed as one
    graph: bool = False  # captured into a CUDA graph
    of_ranks: Callable[[Sequence[float]], float] = max  # the time that counts: of the slowest rank


class Stopwatch(Protocol):
    """Captures and times calls on this rank."""

    def capture(self, call: Call) -> Call:
        """Returns a replay of a call that has run before."""

    def microseconds(self, call: Call) -> float:
        """Runs a call behind a barrier and waits for its end."""


class CudaStopwatch:
    """CUDA graphs and events on the current device."""

    def capture(self, call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        # The watchdog thread of NCCL queries events meanwhile, which the default mode forbids to all threads.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def microseconds(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3


class HostStopwatch:
    """The host's clock, for tests on CPUs: nothing is captured."""

    def capture(self, call: Call) -> Call:
        return call

    def microseconds(self, call: Call) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6


def measure(candidates: Mapping[str, Candidate], stopwatch: Stopwatch, rounds: int) -> dict[str, Timing]:
    """Times every candidate; the same result on all ranks. An error on one rank ends the run: others wait for it."""
    calls = {name: _repeated(candidate, stopwatch) for name, candidate in candidates.items()}
    names, shuffled = list(calls), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(WARM_ROUNDS + rounds):
        for name in shuffled.sample(names, len(names)):
            microseconds = stopwatch.microseconds(calls[name]) / candidates[name].launches
            if i >= WARM_ROUNDS:
                samples[name].append(microseconds)
    return {
        name: timing(_gathered(values, candidates[name]), candidates[name].launches) for name, values in samples.items()
    }


def _repeated(candidate: Candidate, stopwatch: Stopwatch) -> Call:
    def repeated() -> None:
        for _ in range(candidate.launches):
            candidate.call()

    candidate.call()  # lazy initialisation must not happen during a capture
    return stopwatch.capture(repeated) if candidate.graph else repeated


def _gathered(values: list[float], candidate: Candidate) -> list[float]:
    """Returns for each round the time that counts."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return [candidate.of_ranks(times) for times in zip(*gathered, strict=True)]
