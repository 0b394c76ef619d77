"""Attention over several GPUs of a host beside one GPU that does everything: `python -m perf.distributed`.

Starts a process per GPU, NCCL between them. Every result is compared with the reference before its time counts. Decode
over round-robin pages runs in CUDA graphs (and without, for the host's share), prefill by plain calls. "one GPU" does
everything on every GPU at once, and the fastest counts; of all others the slowest rank does. Two parts of a
ring step are timed alone: one exchange of keys and values, and the merge of all rows of a rank.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import cute_attn
from cute_attn.integrations import distributed
from cute_attn.integrations.distributed import ring
from cute_attn.integrations.distributed.ranks import Ranks
from perf import peers, program
from perf.bench import TOLERANCE, oracle, save
from perf.harness import Call, CudaGraphTimer, Timing, interleaved, timing
from perf.workloads import BatchWorkload, equal, one_request

ONE = "one GPU"
GRAPH_LAUNCHES = 20
PAGE_SIZE = 16
ROUNDS, WARM_ROUNDS = 11, 3
SHARDED = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=distributed.ShardedBatchDecodeWithPagedKVCacheWrapper)
TIMEOUT = datetime.timedelta(seconds=150)  # that a rank waits for another one


# ---- timing of calls that all ranks make together: behind a barrier, in an order that all ranks share


class Candidate(NamedTuple):
    """A call, and how it is timed."""

    call: Call
    launches: int = 1  # calls that are timed as one
    graph: bool = False  # captured into a CUDA graph
    of_ranks: Callable[[Sequence[float]], float] = max  # the time that counts: of the slowest rank


class Stopwatch(CudaGraphTimer):
    """Captures and times calls on this rank."""

    forbidden = "thread_local"  # the watchdog thread of NCCL queries events meanwhile

    def microseconds(self, call: Call) -> float:
        """Runs a call behind a barrier and waits for its end."""
        torch.cuda.synchronize()
        dist.barrier()
        return self.run([call])[0] * 1e3


def measure(candidates: Mapping[str, Candidate], stopwatch: Stopwatch, rounds: int) -> dict[str, Timing]:
    """Times every candidate; the same result on all ranks. An error on one rank ends the run: others wait for it."""
    calls = {name: _repeated(candidate, stopwatch) for name, candidate in candidates.items()}

    def one_round(order: Sequence[str]) -> list[float]:
        return [stopwatch.microseconds(calls[name]) / candidates[name].launches for name in order]

    samples = interleaved(list(calls), rounds, one_round, WARM_ROUNDS)
    return {
        name: timing(_gathered(values, candidates[name]), candidates[name].launches) for name, values in samples.items()
    }


def _repeated(candidate: Candidate, stopwatch: Stopwatch) -> Call:
    candidate.call()  # lazy initialisation must not happen during a capture
    if candidate.graph:
        return stopwatch.capture([candidate.call], candidate.launches)
    return lambda: [candidate.call() for _ in range(candidate.launches)]


def _gathered(values: list[float], candidate: Candidate) -> list[float]:
    """Returns for each round the time that counts."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return [candidate.of_ranks(times) for times in zip(*gathered, strict=True)]


# ---- cases

Candidates = dict[str, Candidate]
CASES = [
    *(equal(*sizes, (32, 8), 128, PAGE_SIZE) for sizes in ((1, 1, 262144), (2, 1, 131072), (1, 1, 131072))),
    one_request(65536, 65536, 32, 8, 128, 128, causal=True),
]


def decode(w: BatchWorkload, device: torch.device) -> tuple[Candidates, dict[str, float]]:
    """Returns the candidates of decode, and the errors of their results. Pages are in order."""
    indices = torch.arange(w.kv_indptr[-1], dtype=torch.int32, device=device)
    x = w.inputs(device)._replace(indices=indices)
    truth, rank, ranks = oracle(w, x), dist.get_rank(), dist.get_world_size()
    own = indices.view(len(w.kv_lens), -1)[:, rank::ranks].flatten()
    own_lens = distributed.shard_kv_lens(torch.tensor(w.kv_lens), PAGE_SIZE, rank, ranks)
    own_w = replace(w, kv_lens=tuple(own_lens.tolist()))
    own_x = x._replace(k=x.k[own], v=x.v[own], indices=indices[: len(own)])
    (one,), (some,) = peers.planned(cute_attn, w, [x], True), peers.planned(SHARDED, own_w, [own_x], True)
    errors = {ONE: truth.error(one()), "sharded": truth.error(some())}
    candidates = {
        ONE: Candidate(one, GRAPH_LAUNCHES, graph=True, of_ranks=min),
        "sharded": Candidate(some, GRAPH_LAUNCHES, graph=True),
        "sharded, no graph": Candidate(some, GRAPH_LAUNCHES),
    }
    return candidates, errors


def prefill(w: BatchWorkload, device: torch.device) -> tuple[Candidates, dict[str, float]]:
    """Returns the candidates of prefill and the parts of a ring step, and the errors of results."""
    x = w.inputs(device)
    qkv, truth = (x.q, x.k, x.v), oracle(w, x)
    zigzag = [distributed.shard_zigzag(part) for part in qkv]
    tokens = w.kv_lens[0] // dist.get_world_size()
    consecutive = [part[dist.get_rank() * tokens :][:tokens] for part in qkv]
    calls: dict[str, Callable[[], Any]] = {
        ONE: lambda: cute_attn.single_prefill_with_kv_cache(*qkv, causal=True),
        "ring": lambda: distributed.ring_prefill(*zigzag),
        "ulysses": lambda: distributed.ulysses_attention(*consecutive),
    }
    errors = {
        ONE: truth.error(calls[ONE]()),
        "ring": truth.error(distributed.unshard_zigzag(calls["ring"]())),
        "ulysses": truth.error(_in_order(calls["ulysses"]())),
    }
    candidates = {name: Candidate(call, of_ranks=min if name == ONE else max) for name, call in calls.items()}
    return candidates | _parts(zigzag), errors


def _in_order(own: torch.Tensor) -> torch.Tensor:
    """Returns the consecutive parts of all ranks."""
    gathered = own.new_empty(dist.get_world_size(), *own.shape)
    Ranks.of(None).all_gather(gathered, own.contiguous())
    return gathered.flatten(0, 1)


def _parts(own: Sequence[torch.Tensor]) -> Candidates:
    """Returns an exchange of keys and values, and a merge of all rows, which a ring makes after its first step."""
    q, k, v = own
    arriving = torch.empty_like(k), torch.empty_like(v)
    o, lse = torch.zeros(2, *q.shape, device=q.device), torch.zeros(2, *q.shape[:2], device=q.device)

    def exchange() -> None:
        for message in ring.exchange((k, v), arriving, Ranks.of(None)):
            message.wait()

    merge = Candidate(lambda: ring.merge_in_place(o[0], lse[0], o[1], lse[1]))
    return {"merge": merge, **({"exchange": Candidate(exchange)} if dist.get_world_size() > 1 else {})}


def measured(w: BatchWorkload, device: torch.device, stopwatch: Stopwatch, rounds: int) -> dict[str, Any]:
    """Returns the record of a case. Raises if a result is wrong."""
    candidates, errors = (prefill if w.single else decode)(w, device)
    tolerance = TOLERANCE[w.dtype]
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        raise RuntimeError(f"{w.name}: errors against the reference above {tolerance:.1e}: {wrong}")
    if dist.get_rank() == 0:
        print(f"{w.name}: errors {', '.join(f'{name} {error:.1e}' for name, error in errors.items())}", flush=True)
    timings = measure(candidates, stopwatch, rounds)
    entries = {name: timing._asdict() for name, timing in timings.items()}
    for name, error in errors.items():
        entries[name]["error"] = error
        if name != ONE:
            entries[name]["speedup"] = timings[ONE].median_us / timings[name].median_us
    return {"name": w.name, "workload": asdict(w), "candidates": entries}


def run_rank(rank: int, world_size: int, folder: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Measures all cases on one rank; rank 0 prints and records them."""
    start = time.perf_counter()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not to be had on every host, and not needed
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=device,
    )
    rows = record["distributed"]
    for case in CASES:
        if not all(word in f"{case.phase} {case.name}" for word in options.only):
            continue
        rows.append(measured(case, device, Stopwatch(), options.rounds))
        torch.cuda.empty_cache()
        if rank == 0:
            print(f"{program.line(rows[-1])} [{time.perf_counter() - start:.0f} s]", flush=True)
            save(record, options.out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = program.parser("distributed", __doc__, ROUNDS)
    parser.add_argument("--gpus", type=int, default=2, help="number of GPUs (default 2)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose phase and name contain these")
    options = parser.parse_args()
    program.gpu(count=options.gpus)
    record = {**program.head("distributed", gpus=str(options.gpus)), "distributed": []}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.gpus, folder, options, record)
        torch.multiprocessing.spawn(run_rank, args=arguments, nprocs=options.gpus)


if __name__ == "__main__":
    main()
