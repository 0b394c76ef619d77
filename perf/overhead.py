"""Host time per call in microseconds: `python -m perf.overhead --out perf/results/overhead.json`.

Calls on tiny problems are issued back to back without waiting for the GPU, few enough that its queue never fills:
wall time divided by the number of calls is host time. The parts of our own calls are timed in the same way.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import cute_attn
from cute_attn.dispatch import backends
from cute_attn.request import single as single_request
from cute_attn.runtime.launch import Launch, current_stream
from perf import batch_peers
from perf.batch_workloads import equal
from perf.bench import publish
from perf.harness import Call, Timing, reason, timing
from perf.machine import command_line, environment, why_no_gpu
from perf.peers import PEERS, Peer
from perf.workloads import Inputs, Workload

CALLS = 200  # of at most two kernels: the launch queue holds about 1000
REPEATS = 31
PREFILL = Workload(64, 64, 32, 8, 128, 128, causal=True)
DECODE = Workload(1, 256, 32, 8, 128, 128)
LONG = Workload(1, 8192, 32, 8, 128, 128)  # split-KV: two launches and a workspace, 13 us on an H200
BATCHES = (
    equal(2, 64, 64, (32, 8), 128, causal=True),
    equal(2, 64, 64, (32, 8), 128, 16),
    equal(4, 1, 64, (32, 8), 128, 16),
)
REQUESTS = 256
PEER_NAMES = ("torch flash", "FlashInfer fa2", "FlashInfer decode", "FlashInfer decode tc")


def host_time(
    call: Call,
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
    calls: int = CALLS,
    repeats: int = REPEATS,
) -> Timing:
    """Returns the microseconds of host time per `call`; `wait` empties the queue before each repeat."""
    samples = []
    for _ in range(repeats + 1):
        wait()
        start = clock()
        for _ in range(calls):
            call()
        samples.append((clock() - start) / 1e3 / calls)
    wait()
    return timing(samples[1:], calls)  # the first repeat loads and compiles


class GrowingCache:
    """Decode with one more token of the cache in each call, as a serving loop does, including its two slices."""

    def __init__(self, x: Inputs, decode: Callable[..., Any]) -> None:
        self.x, self.decode, self.kv_len = x, decode, 1

    def __call__(self) -> None:
        x, n = self.x, self.kv_len
        self.decode(x.q[0], x.k[:n], x.v[:n])
        self.kv_len = n % x.k.shape[0] + 1


def batch_calls(device: torch.device) -> dict[str, Call]:
    """Returns a run of each wrapper, and plans of 256 requests from lengths on the host."""
    calls: dict[str, Call] = {}
    for w in BATCHES:
        calls[f"{w.phase} wrapper, run"] = batch_peers.ours("auto", w, [w.inputs(device)])[0]
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(7, 500, (REQUESTS,), generator=generator)
    kv_indptr = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0))).int()
    indices = torch.zeros(int(kv_indptr[-1]), dtype=torch.int32, device=device)
    last_page_len = torch.full((REQUESTS,), 16, dtype=torch.int32)
    workspace = torch.empty(batch_peers.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    decode = cute_attn.BatchDecodeWithPagedKVCacheWrapper(workspace)
    prefill = cute_attn.BatchPrefillWithPagedKVCacheWrapper(workspace)
    shape, dtype = (32, 8, 128, 16), torch.bfloat16
    few = torch.arange(REQUESTS + 1, dtype=torch.int32) * 100
    paged = kv_indptr, indices, last_page_len
    return calls | {
        "plan, decode of 256 requests": lambda: decode.plan(*paged, *shape, q_data_type=dtype),
        "plan, prefill of 256 requests": lambda: prefill.plan(few, *paged, *shape, causal=True, q_data_type=dtype),
    }


def calls(device: torch.device) -> dict[str, Call]:
    """Returns the calls of single requests that users make."""
    prefill, decode, long = (w.inputs(device) for w in (PREFILL, DECODE, LONG))
    single_decode = cute_attn.single_decode_with_kv_cache
    return {
        "single_prefill_with_kv_cache": lambda: cute_attn.single_prefill_with_kv_cache(*prefill, causal=True),
        "single_decode_with_kv_cache": lambda: single_decode(decode.q[0], decode.k, decode.v),
        "single_decode_with_kv_cache, split": lambda: single_decode(long.q[0], long.k, long.v),
        "single_decode_with_kv_cache, growing cache": GrowingCache(long, single_decode),
        "  of that, slicing k and v": GrowingCache(long, lambda q, k, v: None),
    }


def parts(device: torch.device) -> dict[str, Call]:
    """Returns the stages of a decode call separately: arguments to Problem, Problem to launches, launches."""
    x = DECODE.inputs(device)
    arguments = single_request.Call(x.q[0], x.k, x.v, decode=True)
    problem = single_request.problem(arguments)
    launches = recorded_launches(lambda: backends.run(problem))

    def fire() -> None:
        for launch, fired in launches:
            launch.fire(*fired)

    return {
        "decode: check arguments, allocate out": lambda: single_request.problem(arguments),
        "decode: plan, fill parameters, launch": lambda: backends.run(problem),
        f"decode: {len(launches)} launches alone": fire,
        "one torch.empty": lambda: torch.empty(32, 128, dtype=torch.bfloat16, device=device),
        "one query of the current stream": lambda: current_stream(device.index),
    }


def recorded_launches(call: Call) -> list[tuple[Launch, tuple[Any, ...]]]:
    """Returns the launches that `call` makes, with their arguments."""
    fired: list[tuple[Launch, tuple[Any, ...]]] = []
    fire = Launch.fire

    def record(self: Launch, *arguments: Any) -> None:
        fired.append((self, arguments))
        fire(self, *arguments)

    with mock.patch.object(Launch, "fire", record):
        call()
    return fired


def peers(device: torch.device) -> dict[str, Callable[[], Call]]:
    """Returns the same problems for peers; bound later, since binding may fail."""
    pairs = [(p, w) for p in PEERS if p.name in PEER_NAMES for w in (PREFILL, DECODE) if w.phase in p.phases]

    def bind(peer: Peer, w: Workload) -> Call:
        return peer.bind(w, [w.inputs(device)])[0]

    return {f"{p.name}, {w.phase}": functools.partial(bind, p, w) for p, w in pairs}


def measure_all(device: torch.device) -> dict[str, Any]:
    """Returns the timing, or the reason why there is none, by name."""
    results: dict[str, Any] = {}

    def add(name: str, bind: Callable[[], Call]) -> None:
        try:
            results[name] = host_time(bind(), torch.cuda.synchronize)._asdict()
        except Exception as error:  # a failing peer must not end the run
            results[name] = {"reason": reason(error)}
        print(name, results[name], file=sys.stderr, flush=True)

    for name, call in {**calls(device), **batch_calls(device), **parts(device)}.items():
        add(name, lambda call=call: call)  # type: ignore[misc]
    for name, bind in peers(device).items():
        add(name, bind)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.overhead", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    options = parser.parse_args(argv)
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    record = {
        "command": command_line("overhead", sys.argv[1:]),
        "environment": environment(),
        "overhead": measure_all(torch.device("cuda", torch.cuda.current_device())),
    }
    publish(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
