"""Timing of kernels, the same for all benchmarks.

A candidate is a list of calls, one per copy of the inputs. Its launches are captured into a CUDA graph that cycles
through the copies (together larger than twice the L2), so that neither host time nor a warm cache affects the result.
All candidates of a row run in every round, in random order, so that drift of clocks and temperature affects all alike.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from perf.machine import nvidia_smi

Call = Callable[[], Any]

GRAPH_MS = 10.0  # duration of a graph; its launch costs some 10 us, 0.1 % of this
MIN_LAUNCHES = 20  # launches of a short kernel in one graph
SHORT_MS = 1.0
MAX_LAUNCHES = 2000
ROUNDS = 21
WARM_ROUNDS = (3, 15)  # fewest and most
READ_BYTES, GEMM_SIZE = 4 << 30, 8192  # of ceilings
CLOCK_REPLAYS = 40  # of GRAPH_MS each: the GPU stays busy while nvidia-smi runs (some 100 ms)
STEADY = 0.02  # warm-up ends when a round differs from the previous one by less than this fraction


class Timing(NamedTuple):
    """Microseconds per launch over all rounds: median, 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float
    launches: int
    rounds: int


@dataclass(frozen=True)
class Replay:
    """Captured launches."""

    graph: torch.cuda.CUDAGraph
    launches: int

    def __call__(self) -> None:
        self.graph.replay()


class CudaGraphTimer:
    """Captures launches into CUDA graphs on the current device and times their replays."""

    forbidden = "global"  # where a capture forbids calls that it would not record

    def capture(self, calls: Sequence[Call], launches: int) -> Replay:
        """Captures `launches` launches, cycling through `calls`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=self.forbidden):
            for i in range(launches):
                calls[i % len(calls)]()
        return Replay(graph, launches)

    def run(self, replays: Sequence[Call]) -> list[float]:
        """Replays each once, in order, and returns their milliseconds.

        Synchronises only at the end, so that the GPU does not idle and slow down between candidates.
        """
        events = []
        for replay in replays:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def sm_clock_mhz(self, replay: Replay) -> int | None:
        """Returns the SM clock in MHz while `replay` runs; None if it is unknown."""
        for _ in range(CLOCK_REPLAYS):
            replay()
        clock = nvidia_smi("clocks.sm")
        torch.cuda.synchronize()
        return int(clock) if clock and clock.isdigit() else None


def reason(error: BaseException) -> str:
    """Returns one line that says why a candidate is excluded: the error, and the one that it followed."""
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    return words if error.__context__ is None else f"{words}; after {reason(error.__context__)}"


def measure(
    candidates: Mapping[str, Sequence[Call]], timer: CudaGraphTimer, rounds: int = ROUNDS
) -> tuple[dict[str, dict[str, Any]], int | None]:
    """Returns the fields of every candidate's `Timing`, or a "reason" where it cannot be captured, and the SM clock."""
    results: dict[str, dict[str, Any]] = {}
    replays: dict[str, Replay] = {}
    for name, calls in candidates.items():
        try:
            replays[name] = _sized_capture(calls, timer)
        except Exception as error:  # a failing peer must not end the run
            results[name] = {"reason": f"not captured: {reason(error)}"}
    if not replays:
        return results, None
    _warm_up(list(replays.values()), timer)
    samples = interleaved(list(replays), rounds, lambda order: timer.run([replays[name] for name in order]))
    for name, milliseconds in samples.items():
        launches = replays[name].launches
        results[name] = timing([ms * 1e3 / launches for ms in milliseconds], launches)._asdict()
    return results, timer.sm_clock_mhz(next(iter(replays.values())))


def interleaved(
    names: Sequence[str], rounds: int, run: Callable[[Sequence[str]], Sequence[float]], warm: int = 0
) -> dict[str, list[float]]:
    """Returns what rounds of all names gave for each; `warm` rounds before them do not count. `run`: a round.

    Not in fixed order: a candidate that always follows a slow one finds a cooler GPU, worth up to 9 %.
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    shuffled = random.Random(0)
    for i in range(warm + rounds):
        order = shuffled.sample(names, len(names))
        for name, value in zip(order, run(order), strict=True):
            samples[name] += [value] * (i >= warm)
    return samples


def _sized_capture(calls: Sequence[Call], timer: CudaGraphTimer) -> Replay:
    """Captures enough launches to time, a multiple of the number of input sets."""
    for call in calls:
        call()  # lazy initialisation (handles, workspaces, modules) must not happen during a capture
    probe = timer.capture(calls, len(calls))
    timer.run([probe])
    launch_ms = max(timer.run([probe])[0] / probe.launches, 1e-4)
    wanted = min(math.ceil(GRAPH_MS / launch_ms), MAX_LAUNCHES)
    if launch_ms < SHORT_MS:
        wanted = max(wanted, MIN_LAUNCHES)
    return timer.capture(calls, math.ceil(wanted / len(calls)) * len(calls))


def _warm_up(replays: Sequence[Replay], timer: CudaGraphTimer) -> None:
    """Runs rounds until two successive ones agree."""
    fewest, most = WARM_ROUNDS
    previous: list[float] = []
    for round_index in range(most):
        current = timer.run(replays)
        steady = previous and all(abs(a - b) <= STEADY * b for a, b in zip(current, previous, strict=True))
        if steady and round_index >= fewest:
            return
        previous = current


def timing(values: Sequence[float], launches: int) -> Timing:
    """Returns the statistics of the microseconds of all rounds."""
    median = statistics.median(values)
    if len(values) == 1:
        return Timing(median, median, median, launches, 1)
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Timing(median, fifths[0], fifths[3], launches, len(values))


# ---- speeds that plain torch reaches on this machine, measured in the same run as what is compared with them


def ceilings(
    timer: CudaGraphTimer, device: torch.device, read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE
) -> dict[str, float]:
    """Measures "read" and "copy" in GB/s, and "gemm" (bf16, cubic) in TFLOP/s."""
    source = torch.empty(read_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(gemm_size, gemm_size, dtype=torch.bfloat16, device=device) for _ in range(2))
    c = torch.empty_like(a)
    rows = source.view(gemm_size, -1)
    memory, _ = measure(
        {
            "sum": [lambda: source.sum()],
            "max by rows": [lambda: rows.amax(dim=1)],
            "copy": [lambda: target.copy_(source)],
        },
        timer,
    )
    # Alone: interleaved with copies, the GPU would cool down in between and clock higher than attention can.
    matrix, _ = measure({"gemm": [lambda: torch.mm(a, b, out=c)]}, timer)
    read = min(_median(memory["sum"]), _median(memory["max by rows"]))
    return {
        "read": read_bytes / read * 1e-3,
        "copy": 2 * read_bytes / _median(memory["copy"]) * 1e-3,
        "gemm": 2 * gemm_size**3 / _median(matrix["gemm"]) * 1e-6,
    }


def _median(result: Mapping[str, Any]) -> float:
    if "reason" in result:
        raise RuntimeError(f"a ceiling could not be measured: {result['reason']}")
    return float(result["median_us"])
