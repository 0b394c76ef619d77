"""The one way in which kernels are timed.

A candidate is a list of calls, one per copy of the inputs. Its launches are captured into a CUDA graph that
walks through the copies (together larger than twice the L2), so neither host time nor a warm cache flatters
anybody. All candidates of a row take turns, in an order that rotates every round: drift of clocks and
temperature hits all.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from perf.machine import nvidia_smi

Call = Callable[[], Any]

GRAPH_MS = 10.0  # a graph launch costs some 10 us: 0.1 % of this
MIN_LAUNCHES = 20  # of a short kernel in one graph
SHORT_MS = 1.0
MAX_LAUNCHES = 2000
ROUNDS = 21
WARM_ROUNDS = (3, 15)  # at least, at most
CLOCK_REPLAYS = 40  # at GRAPH_MS each: the GPU stays busy while nvidia-smi (some 100 ms) looks
STEADY = 0.02  # warm-up ends when a round repeats the one before it to this


class Timing(NamedTuple):
    """Microseconds a launch over the rounds: median and the 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float
    launches: int
    rounds: int


class Replay(Protocol):
    """Captured launches."""

    @property
    def launches(self) -> int:
        """How many run at each replay."""


class Timer(Protocol):
    def capture(self, calls: Sequence[Call], launches: int) -> Replay:
        """Make `launches` launches replayable, walking through `calls` in turn."""

    def run(self, replays: Sequence[Any]) -> list[float]:
        """Replay each once, in order; milliseconds of each."""

    def sm_clock_mhz(self, replay: Any) -> int | None:
        """The SM clock under the load of `replay`."""


class Measurement(NamedTuple):
    """A timing, or the reason why there is none, of every candidate of a row."""

    timings: dict[str, Timing | str]
    sm_clock_mhz: int | None


class CudaGraphReplay(NamedTuple):
    graph: torch.cuda.CUDAGraph
    launches: int


class CudaGraphTimer:
    """Times with CUDA graphs and events on the current device."""

    def capture(self, calls: Sequence[Call], launches: int) -> CudaGraphReplay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                calls[i % len(calls)]()
        return CudaGraphReplay(graph, launches)

    def run(self, replays: Sequence[Any]) -> list[float]:
        """One synchronisation at the end: the GPU does not idle (and slow down) between candidates."""
        events = []
        for replay in replays:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay.graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def sm_clock_mhz(self, replay: Any) -> int | None:
        for _ in range(CLOCK_REPLAYS):
            replay.graph.replay()
        clock = nvidia_smi("clocks.sm")
        torch.cuda.synchronize()
        return int(clock) if clock and clock.isdigit() else None


def reason(error: BaseException) -> str:
    """One line that says why a candidate is out."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def measure(candidates: Mapping[str, Sequence[Call]], timer: Timer, rounds: int = ROUNDS) -> Measurement:
    """Time every candidate; one that cannot be captured gets its reason (a string) and the others go on."""
    results: dict[str, Timing | str] = {}
    replays: dict[str, Replay] = {}
    for name, calls in candidates.items():
        try:
            replays[name] = _sized_capture(calls, timer)
        except Exception as error:  # a peer's failure must not end the run
            results[name] = f"not captured: {reason(error)}"
    if not replays:
        return Measurement(results, None)
    _warm_up(list(replays.values()), timer)
    samples: dict[str, list[float]] = {name: [] for name in replays}
    names, shuffled = list(replays), random.Random(0)
    for _ in range(rounds):
        # Not in turns: whoever always follows a slow candidate finds a cooler GPU, which was worth up to 9 %.
        order = shuffled.sample(names, len(names))
        for name, milliseconds in zip(order, timer.run([replays[n] for n in order]), strict=True):
            samples[name].append(milliseconds * 1e3 / replays[name].launches)
    for name, values in samples.items():
        results[name] = timing(values, replays[name].launches)
    return Measurement(results, timer.sm_clock_mhz(replays[names[0]]))


def _sized_capture(calls: Sequence[Call], timer: Timer) -> Replay:
    """A capture long enough to time, in whole walks through the sets."""
    for call in calls:
        call()  # what is lazy (handles, workspaces, modules) must not happen in a capture
    probe = timer.capture(calls, len(calls))
    timer.run([probe])
    launch_ms = max(timer.run([probe])[0] / probe.launches, 1e-4)
    wanted = min(math.ceil(GRAPH_MS / launch_ms), MAX_LAUNCHES)
    if launch_ms < SHORT_MS:
        wanted = max(wanted, MIN_LAUNCHES)
    return timer.capture(calls, math.ceil(wanted / len(calls)) * len(calls))


def _warm_up(replays: Sequence[Replay], timer: Timer) -> None:
    """Rounds until clocks and caches repeat themselves."""
    least, most = WARM_ROUNDS
    previous: list[float] = []
    for turn in range(most):
        current = timer.run(replays)
        steady = previous and all(abs(a - b) <= STEADY * b for a, b in zip(current, previous, strict=True))
        if steady and turn >= least:
            return
        previous = current


def timing(values: Sequence[float], launches: int) -> Timing:
    median = statistics.median(values)
    if len(values) == 1:
        return Timing(median, median, median, launches, 1)
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Timing(median, fifths[0], fifths[3], launches, len(values))
