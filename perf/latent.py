"""Latent attention (MLA) decode beside FlashInfer and FlashMLA: `python -m perf.latent --out perf/results/X.json`.

Lengths and page tables are on the GPU; pages have 64 tokens. Launches are timed in CUDA graphs (`perf.harness`) that
cycle through copies of the cache. Peers have no e4m3 caches of one scale on Hopper: over these they are timed with the
conversion of the cache to bf16 that engines make in each layer. Outputs are compared with the formula first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import cute_attn
from perf.bench import save
from perf.harness import ROUNDS, Call, CudaGraphTimer, Timing, ceilings, measure, reason
from perf.machine import command_line, environment, flashinfer, module, require, why_no_gpu

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
CACHED_BYTES = 160 << 20  # of all copies of the cache together, beyond twice the L2
TOLERANCE = 1e-2  # relative difference to the formula in norm
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentWorkload:
    """Requests of one length, with `q_len` causal query tokens each."""

    requests: int
    kv_len: int
    heads: int
    q_len: int = 1
    narrow: bool = False  # an e4m3 cache

    @property
    def name(self) -> str:
        tokens = f" q{self.q_len}" if self.q_len > 1 else ""
        return f"{self.requests} x {self.kv_len}, {self.heads} heads{tokens}, {'e4m3' if self.narrow else 'bf16'}"

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the cache's rows."""
        return self.requests * self.kv_len * (LATENT + ROPE) * (1 if self.narrow else 2)

    @property
    def flops(self) -> float:
        pairs = self.q_len * self.kv_len - self.q_len * (self.q_len - 1) // 2  # of a query token and a key
        return 2.0 * self.requests * self.heads * pairs * (2 * LATENT + ROPE)


WIDE = (
    *(LatentWorkload(1, 1024, 16), LatentWorkload(32, 1024, 16), LatentWorkload(128, 1024, 16)),
    *(LatentWorkload(64, 4096, 16), LatentWorkload(1, 131072, 16), LatentWorkload(64, 8192, 8)),
    *(LatentWorkload(128, 4096, 128), LatentWorkload(128, 4096, 128, q_len=2), LatentWorkload(128, 4096, 64)),
)
WORKLOADS = [*WIDE, *(replace(w, narrow=True) for w in WIDE)]


@dataclass(frozen=True)
class Inputs:
    w: LatentWorkload
    q: torch.Tensor  # [requests, q_len, heads, 576]
    cache: torch.Tensor  # [pages, 64, 576]
    table: torch.Tensor
    lens: torch.Tensor
    workspace: torch.Tensor

    def wide(self) -> torch.Tensor:
        """Returns the cache as peers read it."""
        return self.cache.to(self.q.dtype)

    def bounds(self, step: int) -> torch.Tensor:
        return step * torch.arange(self.w.requests + 1, dtype=torch.int32, device=self.q.device)


def inputs(w: LatentWorkload, device: torch.device, copies: int) -> list[Inputs]:
    generator = torch.Generator(device).manual_seed(0)
    per = -(-w.kv_len // PAGE)
    order = torch.randperm(w.requests * per, device=device, generator=generator, dtype=torch.int32)
    q = 0.5 * torch.randn(w.requests, w.q_len, w.heads, LATENT + ROPE, device=device, generator=generator)
    lens = torch.full((w.requests,), w.kv_len, dtype=torch.int32, device=device)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    found = []
    for _ in range(copies):
        cache = torch.randn(len(order), PAGE, LATENT + ROPE, device=device, generator=generator, dtype=torch.bfloat16)
        cache = cache.to(E4M3) if w.narrow else cache
        found.append(Inputs(w, q.bfloat16(), cache, order.view(w.requests, per), lens, workspace))
    return found


def ours(x: Inputs) -> Call:
    function = cute_attn.trtllm_batch_decode_with_kv_cache_mla
    dims, options = (128, LATENT, ROPE), {"bmm1_scale": SCALE, "bmm2_scale": 1.0}
    return lambda: function(x.q, x.cache, x.workspace, *dims, x.table, x.lens, x.w.kv_len, **options)


def by_flashinfer(backend: str) -> Callable[[Inputs], Call]:
    def call(x: Inputs) -> Call:
        w, made = x.w, flashinfer("flashinfer.mla").BatchMLAPagedAttentionWrapper(x.workspace, backend=backend)
        indptr = x.bounds(x.table.shape[1])
        dims, dtypes = (w.heads, LATENT, ROPE, PAGE, True, SCALE), (x.q.dtype, x.q.dtype)
        made.plan(x.bounds(w.q_len), indptr, x.table.flatten(), x.lens, *dims, *dtypes)
        parts = x.q.flatten(0, 1).split((LATENT, ROPE), dim=-1)
        return lambda: made.run(*parts, *x.wide().split((LATENT, ROPE), dim=-1)).view(*x.q.shape[:3], LATENT)

    return call


def by_flashmla(x: Inputs) -> Call:
    module("vllm._flashmla_C"), module("vllm._flashmla_extension_C")
    found = module("vllm.third_party.flashmla.flash_mla_interface")
    schedule, _ = found.get_mla_metadata()
    options = {"softmax_scale": SCALE, "causal": x.w.q_len > 1}
    arguments = x.table, x.lens, LATENT, schedule
    return lambda: found.flash_mla_with_kvcache(x.q, x.wide().unsqueeze(2), *arguments, **options)[0]


CANDIDATES: dict[str, Callable[[Inputs], Call]] = {
    "cute_attn": ours,
    "FlashMLA": by_flashmla,
    "FlashInfer fa3": by_flashinfer("fa3"),
    "FlashInfer fa2": by_flashinfer("fa2"),
}


def formula(x: Inputs, request: int) -> torch.Tensor:
    """Returns the outputs [q_len, heads, 512] of a request in fp64."""
    w = x.w
    rows = x.cache[x.table[request].long()].flatten(0, 1)[: w.kv_len].double()
    s = torch.einsum("qhd,kd->qhk", x.q[request].double(), rows) * SCALE
    last = torch.arange(w.kv_len - w.q_len, w.kv_len, device=s.device)[:, None, None]
    s = s.masked_fill(torch.arange(w.kv_len, device=s.device) > last, -math.inf)
    return s.softmax(-1) @ rows[:, :LATENT]


def measured(w: LatentWorkload, device: torch.device, rounds: int) -> dict[str, Any]:
    """Returns the record of a row: microseconds, GB/s and TFLOP/s, or why there are none."""
    sets = inputs(w, device, max(2, -(-CACHED_BYTES // w.num_bytes)))
    checked = sorted({0, w.requests - 1})
    want = torch.stack([formula(sets[0], request) for request in checked])
    calls: dict[str, Sequence[Call]] = {}
    entries: dict[str, dict[str, Any]] = {name: {} for name in CANDIDATES}
    for name, make in CANDIDATES.items():
        try:
            made = [make(x) for x in sets]
            error = float((made[0]()[checked].double() - want).norm() / want.norm())
            require(error <= TOLERANCE, f"wrong: relative difference {error:.2e} to the formula")
        except Exception as failure:  # a failing peer must not end the run
            entries[name]["reason"] = reason(failure)
        else:
            calls[name], entries[name]["error"] = made, error
    measurement = measure(calls, CudaGraphTimer(), rounds)
    for name, timing in measurement.timings.items():
        if isinstance(timing, Timing):
            speeds = {"gb_per_s": w.num_bytes / timing.median_us * 1e-3, "tflops": w.flops / timing.median_us * 1e-6}
            entries[name] |= timing._asdict() | speeds
        else:
            entries[name]["reason"] = timing
    return {"name": w.name, "workload": asdict(w), "candidates": entries, "sm_clock_mhz": measurement.sm_clock_mhz}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.latent", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every row")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"number of timed rounds (default {ROUNDS})")
    options = parser.parse_args()
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    record = {
        "command": command_line("latent", sys.argv[1:]),
        "environment": environment(),
        "ceilings": ceilings(CudaGraphTimer(), device),
        "latent": rows,
    }
    for w in WORKLOADS:
        rows.append(measured(w, device, options.rounds))
        cells = [
            f"{name} {entry['median_us']:.1f} us, {entry['gb_per_s']:.0f} GB/s, {entry['tflops']:.0f} TFLOP/s"
            if "median_us" in entry
            else f"{name} - ({entry['reason']})"
            for name, entry in rows[-1]["candidates"].items()
        ]
        print(f"{w.name}: {'; '.join(cells)}", flush=True)
        if options.out:
            save(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
