"""Host time per call in microseconds: `python -m perf.overhead --out perf/results/overhead.json`.

Calls on tiny problems are issued back to back without waiting for the GPU, few enough that its queue never fills:
wall time divided by the number of calls is host time. Rounds of our calls and of the peers' take turns in random order,
because clocks of the host drift. The parts of our own calls are timed in the same way.

`--pretend sm_90a` needs no GPU: it times our host code alone, in CPU time, with a driver that does nothing.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from cute_attn.dispatch import backends
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import ARCHS
from cute_attn.runtime.launch import Bound, current_stream
from perf import program
from perf.bench import publish
from perf.harness import Call, Timing, reason, timing
from perf.host_calls import (
    BATCHES,
    DECODE,
    LONG,
    PREFILL,
    GrowingCache,
    batch_calls,
    calls,
    optional_calls,
    plan_calls,
    unplanned_calls,
    unplanned_optional_calls,
)
from perf.machine import flashinfer
from perf.peers import PEERS, Peer
from perf.pretended_gpu import pretended_gpu
from perf.workloads import BatchWorkload, Workload

CALLS = 200  # of at most two kernels: the launch queue holds about 1000
REPEATS = 31
PLANS = 40  # of a round: an upload waits for the second before it
PEER_NAMES = ("torch flash", "FlashInfer fa2", "FlashInfer decode", "FlashInfer decode tc", "FlashInfer XQA")


def host_times(
    calls: Mapping[str, Call],
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
    repeats: int = REPEATS,
) -> dict[str, Timing]:
    """Returns the microseconds of host time per call, rounds of all calls in random order. `wait` empties the queue."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, generator = list(calls), random.Random(0)
    for _ in range(repeats + 1):
        generator.shuffle(order)
        for name in order:
            call, number = calls[name], PLANS if "plan" in name else CALLS
            wait()
            start = clock()
            for _ in range(number):
                call()
            samples[name].append((clock() - start) / 1e3 / number)
    wait()
    return {name: timing(found[1:], PLANS if "plan" in name else CALLS) for name, found in samples.items()}


def parts(device: torch.device) -> dict[str, Call]:
    """Returns the stages of a decode call separately: arguments to Problem, Problem to launches, launches."""
    x = DECODE.inputs(device)
    arguments = single_request.Call(x.q[0], x.k, x.v, decode=True)
    problem = single_request.problem(arguments)
    launches = recorded_launches(lambda: backends.run(problem))

    def fire() -> None:
        for bound, fired in launches:
            bound.fire(*fired)

    return {
        "decode: check arguments, allocate out": lambda: single_request.problem(arguments),
        "decode: plan, fill parameters, launch": lambda: backends.run(problem),
        f"decode: {len(launches)} launches alone": fire,
        "one torch.empty": lambda: torch.empty(32, 128, dtype=torch.bfloat16, device=device),
        "one query of the current stream": lambda: current_stream(device.index),
    }


def recorded_launches(call: Call) -> list[tuple[Bound, tuple[Any, ...]]]:
    """Returns the launches that `call` makes, with their arguments."""
    fired: list[tuple[Bound, tuple[Any, ...]]] = []
    fire = Bound.fire

    def record(self: Bound, *arguments: Any) -> None:
        fired.append((self, arguments))
        fire(self, *arguments)

    with mock.patch.object(Bound, "fire", record):
        call()
    return fired


def peers(device: torch.device) -> dict[str, Callable[[], dict[str, Call]]]:
    """Returns the same problems for peers; bound later, since binding may fail."""

    def bind(peer: Peer, w: Workload | BatchWorkload, name: str) -> dict[str, Call]:
        bound: Any = peer.bind
        return {name: bound(w, [w.inputs(device)])[0]}

    found: dict[str, Callable[[], dict[str, Call]]] = {}
    workloads: tuple[Workload | BatchWorkload, ...] = PREFILL, DECODE, *BATCHES
    for peer, w in itertools.product(PEERS, workloads):
        if peer.name in PEER_NAMES and w.phase in peer.phases:
            name = f"{peer.name}, {w.phase}{' wrapper, run' if w in BATCHES else ''}"
            found.setdefault(name, functools.partial(bind, peer, w, name))

    def growing() -> dict[str, Call]:
        decode = flashinfer("flashinfer").single_decode_with_kv_cache
        return {"FlashInfer decode, growing cache": GrowingCache(LONG.inputs(device), decode)}

    def plans() -> dict[str, Call]:
        library = flashinfer("flashinfer")
        calls = plan_calls(library, device, {"use_tensor_cores": True}, {"backend": "fa2"})
        return {f"FlashInfer fa2, {name}": call for name, call in calls.items()}

    return {**found, "FlashInfer decode, growing cache": growing, "FlashInfer fa2, plan": plans}


def measure_all(device: torch.device) -> dict[str, Any]:
    """Returns the timing, or the reason why there is none, by name."""
    bindings: dict[str, Callable[[], dict[str, Call]]] = {
        "ours": lambda: {**calls(device), **unplanned_calls(device), **batch_calls(device), **parts(device)},
        "ours, optional tensors": lambda: optional_calls(device) | unplanned_optional_calls(device),
        **peers(device),
    }
    ready: dict[str, Call] = {}
    failed: dict[str, Any] = {}
    for name, bind in bindings.items():
        try:
            bound = bind()
        except Exception as error:  # a failing peer must not end the run
            bound, failed[name] = {}, {"reason": reason(error)}
        for each, call in bound.items():
            try:
                call()
                ready[each] = call
            except Exception as error:
                failed[each] = {"reason": reason(error)}
    timed = {name: found._asdict() for name, found in host_times(ready, torch.cuda.synchronize).items()}
    for name, found in {**timed, **failed}.items():
        print(name, found, file=sys.stderr, flush=True)
    return {**timed, **failed}


def pretend(arch: str) -> None:
    """Prints the CPU time of our calls on a GPU that does nothing."""
    device = torch.device("cpu")
    with pretended_gpu(arch) as driver:
        ours = {**calls(device), **batch_calls(device), **optional_calls(device)}
        for name, found in host_times(ours, lambda: None, time.thread_time_ns, 9).items():
            before = driver.launches
            ours[name]()
            print(f"{name:66} {found.median_us:8.1f} us, {driver.launches - before} launches")


def main(argv: Sequence[str] | None = None) -> int:
    parser = program.parser("overhead", __doc__)
    parser.add_argument("--pretend", choices=ARCHS, metavar="ARCH", help="time our calls without a GPU")
    options = parser.parse_args(argv)
    if options.pretend:
        pretend(options.pretend)
        return 0
    device = program.gpu()
    if device is None:
        return 2
    publish({**program.head("overhead"), "overhead": measure_all(device)}, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
