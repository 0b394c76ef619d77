"""Host time per call in microseconds: `python -m perf.overhead --out perf/results/overhead.json`.

Calls on tiny problems are issued back to back without waiting for the GPU, few enough that its queue never fills:
wall time divided by the number of calls is host time. Rounds of our calls and of the peers' take turns in random order,
because clocks of the host drift. The parts of our own calls are timed in the same way.

`--pretend sm_90a` needs no GPU: it times our host code alone, in CPU time, with a driver that does nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

import cute_attn
from cute_attn.dispatch import backends
from cute_attn.request import single as single_request
from cute_attn.runtime.arch import ARCHS
from cute_attn.runtime.launch import Bound, current_stream
from perf import latent, peers, program
from perf.bench import save
from perf.harness import Call, Timing, interleaved, reason, timing
from perf.machine import flashinfer
from perf.peers import PEERS, Peer
from perf.pretended_gpu import pretended_gpu
from perf.report import markdown
from perf.workloads import BatchInputs, BatchWorkload, equal, one_request

CALLS = 200  # of at most two kernels: the launch queue holds about 1000
REPEATS = 31
PLANS = 40  # of a round: an upload waits for the second before it
PEER_NAMES = ("torch flash", "FlashInfer fa2", "FlashInfer decode", "FlashInfer decode tc", "FlashInfer XQA")

PREFILL = one_request(64, 64, 32, 8, 128, 128, causal=True)
DECODE = one_request(1, 256, 32, 8, 128, 128)
LONG = one_request(1, 8192, 32, 8, 128, 128)  # split-KV: two launches and a workspace, 13 us on an H200
BATCHES = (
    equal(2, 64, 64, (32, 8), 128, causal=True),
    equal(2, 64, 64, (32, 8), 128, 16),
    equal(4, 1, 64, (32, 8), 128, 16),
)
# Of plans.
BATCH_SIZES = (2, 256)
PLAN_HEADS, HEAD_DIM, PAGE_SIZE, QO_LEN = (32, 8), 128, 16, 100
MOST_PAGES = 500  # of a request
STEPS = 300  # batches that plans take in turn: more than a library remembers schedules of
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
# Of calls with optional tensors.
SINGLE = one_request(128, 512, 32, 8, 128, 128)
OPTIONAL_DECODE = equal(16, 1, 117, (32, 8), 128, 16)
OPTIONAL_PREFILL = equal(16, 32, 117, (32, 8), 128, 16, causal=True)
UNPLANNED = {  # without a plan
    "batch 16": OPTIONAL_DECODE,
    "sinks": dataclasses.replace(OPTIONAL_DECODE, sinks=True),
    "mask of drafts": equal(16, 2, 117, (32, 8), 128, 16, causal=True),
    "NVFP4": equal(16, 1, 117, (32, 8), 128, 16, kv_dtype="nvfp4"),
}


def host_times(
    calls: Mapping[str, Call],
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
    repeats: int = REPEATS,
) -> dict[str, Timing]:
    """Returns the microseconds of host time per call, rounds of all calls in random order. `wait` empties the queue."""
    number = {name: PLANS if "plan" in name else CALLS for name in calls}

    def microseconds(name: str) -> float:
        wait()
        start = clock()
        for _ in range(number[name]):
            calls[name]()
        return (clock() - start) / 1e3 / number[name]

    samples = interleaved(list(calls), repeats, lambda order: [microseconds(name) for name in order], warm=1)
    wait()
    return {name: timing(found, number[name]) for name, found in samples.items()}


def parts(device: torch.device) -> dict[str, Call]:
    """Returns the stages of a decode call separately: arguments to Problem, Problem to launches, launches."""
    x = DECODE.inputs(device)
    arguments = single_request.Call(x.q[0], x.k, x.v, decode=True)
    problem = single_request.problem(arguments)
    with mock.patch.object(Bound, "fire", autospec=True, side_effect=Bound.fire) as fired:
        backends.run(problem)
    launches = [call.args for call in fired.call_args_list]

    def fire() -> None:
        for bound, *operands in launches:
            bound.fire(*operands)

    return {
        "decode: check arguments, allocate out": lambda: single_request.problem(arguments),
        "decode: plan, fill parameters, launch": lambda: backends.run(problem),
        f"decode: {len(launches)} launches alone": fire,
        "one torch.empty": lambda: torch.empty(32, 128, dtype=torch.bfloat16, device=device),
        "one query of the current stream": lambda: current_stream(device.index),
    }


def peer_calls(device: torch.device) -> dict[str, Callable[[], dict[str, Call]]]:
    """Returns the same problems for peers; bound later, since binding may fail."""

    def bind(peer: Peer, w: BatchWorkload, name: str) -> dict[str, Call]:
        return {name: peer.bind(w, [w.inputs(device)])[0]}

    found: dict[str, Callable[[], dict[str, Call]]] = {}
    workloads: tuple[BatchWorkload, ...] = PREFILL, DECODE, *BATCHES
    for peer, w in itertools.product(PEERS, workloads):
        if peer.name in PEER_NAMES and w.phase in peer.phases:
            name = f"{peer.name}, {w.phase}{' wrapper, run' if w in BATCHES else ''}"
            found.setdefault(name, functools.partial(bind, peer, w, name))

    def others() -> dict[str, Call]:
        library = flashinfer("flashinfer")
        calls = plan_calls(library, device, {"use_tensor_cores": True}, {"backend": "fa2"})
        growing = GrowingCache(LONG.inputs(device), library.single_decode_with_kv_cache)
        plans = {f"FlashInfer fa2, {name}": call for name, call in calls.items()}
        return {"FlashInfer decode, growing cache": growing, **plans}

    return {**found, "FlashInfer fa2, plan": others}


# ---- calls of ours: single ones, runs and plans of wrappers


class GrowingCache:
    """Decode with one more token of the cache in each call, as a serving loop does, including its two slices."""

    def __init__(self, x: BatchInputs, decode: Callable[..., Any]) -> None:
        self.x, self.decode, self.kv_len = x, decode, 1

    def __call__(self) -> None:
        x, n = self.x, self.kv_len
        self.decode(x.q[0], x.k[:n], x.v[:n])
        self.kv_len = n % x.k.shape[0] + 1


def run(w: BatchWorkload, device: torch.device) -> Call:
    return peers.ours(w, [w.inputs(device)], backend="auto")[0]


def batch_calls(device: torch.device) -> dict[str, Call]:
    """Returns a run of each wrapper, and plans."""
    runs = {f"{w.phase} wrapper, run": run(w, device) for w in BATCHES}
    return runs | plan_calls(cute_attn, device, {}, {})


def unplanned_calls(device: torch.device) -> dict[str, Call]:
    """Returns decode without a plan: of a request, as `FlashInfer XQA` decodes it, of 4 into a buffer, and others."""
    calls: dict[str, Call] = {}
    for requests in (1, 4):
        w = equal(requests, 1, 64, (32, 8), 128, 16)
        x = w.inputs(device)
        out = None if requests == 1 else torch.empty_like(x.q)
        name = f"xqa_batch_decode_with_kv_cache, batch {requests}"
        calls[name] = peers.our_xqa(w, [x], torch.stack((x.k, x.v), 1), out=out)[0]
    calls |= {f"xqa, {name}": peers.our_xqa(w, [w.inputs(device)])[0] for name, w in UNPLANNED.items()}
    x, scale = OPTIONAL_DECODE.inputs(device), torch.full((), 0.1, device=device)
    lse = torch.empty(len(OPTIONAL_DECODE.kv_lens), OPTIONAL_DECODE.num_qo_heads, device=device)
    more = {"bmm1_scale": scale, "bmm2_scale": scale, "lse": lse, "return_lse": True}
    return {**calls, "xqa, scale tensors and lse": peers.our_xqa(OPTIONAL_DECODE, [x], **more)[0]}


def calls(device: torch.device) -> dict[str, Call]:
    """Returns the calls of single requests that users make."""
    prefill, decode, long = (w.inputs(device) for w in (PREFILL, DECODE, LONG))
    single_decode = cute_attn.single_decode_with_kv_cache
    return {
        "single_prefill_with_kv_cache": lambda: cute_attn.single_prefill_with_kv_cache(*prefill[:3], causal=True),
        "single_decode_with_kv_cache": lambda: single_decode(decode.q[0], decode.k, decode.v),
        "single_decode_with_kv_cache, split": lambda: single_decode(long.q[0], long.k, long.v),
        "single_decode_with_kv_cache, growing cache": GrowingCache(long, single_decode),
        "  of that, slicing k and v": GrowingCache(long, lambda q, k, v: None),
    }


def latent_calls(device: torch.device) -> dict[str, Call]:
    """Returns latent attention without and with a plan, the splits of the cache in each run of it included."""
    x = latent.inputs(latent.LatentWorkload(16, 256, 16), device, 1)[0]
    return {"trtllm MLA": latent.ours(x), "MLA wrapper, run": latent.planned(cute_attn, "auto", x)}


# ---- plans


def plan_calls(library: Any, device: torch.device, decode: dict[str, Any], prefill: dict[str, Any]) -> dict[str, Call]:
    """Returns plans of few and of many requests, with index arrays on the host and on the device. `decode`, `prefill`:
    options of the wrappers. Lengths differ from call to call: decode requests grow, prompts are others.
    """
    calls: dict[str, Call] = {}
    workspace = torch.empty(peers.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    sizes: tuple[Any, ...] = *PLAN_HEADS, HEAD_DIM, PAGE_SIZE
    for n in BATCH_SIZES:
        indices = torch.zeros(n * MOST_PAGES, dtype=torch.int32, device=device)
        qo_indptr = torch.arange(n + 1, dtype=torch.int32) * QO_LEN
        for place, on in {"host": torch.device("cpu"), "GPU": device}.items():
            growing, others = ([(b.to(on), last.to(on)) for b, last in batches(n, grow)] for grow in (True, False))
            for name, dtype in KV_DTYPES.items():
                wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **decode)
                turns: list[tuple[Any, ...]] = [(bounds, indices, last, *sizes) for bounds, last in growing]
                calls[f"plan, decode of {n} requests, {name}, lengths on the {place}"] = _plan(wrapper, turns, dtype)
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **prefill)
            starts = qo_indptr.to(on)
            turns = [(starts, bounds, indices, last, *sizes) for bounds, last in others]
            name = f"plan, prefill of {n} requests, lengths on the {place}"
            calls[name] = _plan(wrapper, turns, torch.bfloat16, causal=True)
            if device.type == "cpu":
                break
    return calls


def batches(requests: int, growing: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns indptr and last_page_len of decode steps, each with one token more per request, or of batches that have
    nothing in common.
    """
    draws, more = (1, torch.arange(STEPS)[:, None]) if growing else (STEPS, torch.zeros(1, dtype=torch.int64))
    most, generator = MOST_PAGES * PAGE_SIZE - STEPS, torch.Generator().manual_seed(0)
    lengths = torch.randint(QO_LEN, most, (draws, requests), generator=generator) + more
    pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    indptr, last = torch.nn.functional.pad(pages.cumsum(1), (1, 0)), lengths - (pages - 1) * PAGE_SIZE
    return list(zip(indptr.int(), last.int(), strict=True))


def _plan(wrapper: Any, turns: list[tuple[Any, ...]], kv: torch.dtype, **options: Any) -> Call:
    turn = itertools.cycle(turns)
    return lambda: wrapper.plan(*next(turn), q_data_type=torch.bfloat16, kv_data_type=kv, **options)


# ---- calls with tensors that most calls lack (masks, sinks, scales, outputs), and with other lengths every time


def optional_calls(device: torch.device) -> dict[str, Call]:
    """Returns single calls and runs of wrappers, each kind also without such tensors."""
    sinks, scale = torch.zeros(SINGLE.num_qo_heads, device=device), torch.full((), 0.5, device=device)
    tensors: dict[str, dict[str, Any]] = {
        "plain": {},
        "sinks": {"sinks": sinks},
        "scale tensors": {"k_scale": scale, "v_scale": scale},
    }
    q, k, v, *_ = SINGLE.inputs(device)
    kinds: dict[str, Any] = {
        "single_prefill": functools.partial(cute_attn.single_prefill_with_kv_cache, q, k, v, causal=True),
        "single_decode": functools.partial(cute_attn.single_decode_with_kv_cache, q[0], k, v),
        "decode run": run(OPTIONAL_DECODE, device),
        "paged prefill run": run(OPTIONAL_PREFILL, device),
    }
    calls = {f"{kind}, {n}": functools.partial(kinds[kind], **tensors[n]) for kind in kinds for n in tensors}
    bits = torch.full((SINGLE.qo_lens[0] * SINGLE.kv_lens[0] // 8,), 0x5F, dtype=torch.uint8, device=device)
    calls["single_prefill, packed mask"] = functools.partial(kinds["single_prefill"], packed_custom_mask=bits)
    lengths = itertools.cycle(range(2, SINGLE.kv_lens[0]))

    def other_length() -> None:
        n = next(lengths)
        cute_attn.single_prefill_with_kv_cache(q, k[:n], v[:n])

    rows = sum(OPTIONAL_DECODE.qo_lens), OPTIONAL_DECODE.num_qo_heads, OPTIONAL_DECODE.head_dim
    out = torch.empty(rows, dtype=OPTIONAL_DECODE.torch_dtype, device=device)
    plain = dataclasses.replace(OPTIONAL_PREFILL, causal=False)
    pairs = sum(map(plain.pairs, range(len(plain.qo_lens))))
    mask = {"custom_mask": torch.arange(pairs, device=device) % 5 > 0}
    return {
        **calls,
        "single_prefill, another kv_len each": other_length,
        "decode run, out": functools.partial(kinds["decode run"], out=out),
        "paged prefill run, custom mask": peers.planned(cute_attn, plain, [plain.inputs(device)], True, mask)[0],
    }


# ---- the program


def measure_all(device: torch.device) -> dict[str, Any]:
    """Returns the timing, or the reason why there is none, by name."""
    bindings: dict[str, Callable[[], dict[str, Call]]] = {
        "ours": lambda: {**calls(device), **unplanned_calls(device), **batch_calls(device), **parts(device)},
        "ours, optional tensors": lambda: optional_calls(device),
        "ours, MLA": lambda: latent_calls(device),
        **peer_calls(device),
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
        ours = {**calls(device), **batch_calls(device), **optional_calls(device), **latent_calls(device)}
        for name, found in host_times(ours, lambda: None, time.thread_time_ns, 9).items():
            before = driver.launches
            ours[name]()
            print(f"{name:66} {found.median_us:8.1f} us, {driver.launches - before} launches")


def main(argv: Sequence[str] | None = None) -> None:
    parser = program.parser("overhead", __doc__)
    parser.add_argument("--pretend", choices=ARCHS, metavar="ARCH", help="time our calls without a GPU")
    options = parser.parse_args(argv)
    if options.pretend:
        return pretend(options.pretend)
    record = {**program.head("overhead"), "overhead": measure_all(program.gpu())}
    save(record, options.out)
    print(markdown(record))


if __name__ == "__main__":
    main()
