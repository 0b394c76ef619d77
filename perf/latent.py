"""Latent attention (MLA) decode beside FlashInfer and FlashMLA: `python -m perf.latent --out perf/results/X.json`.

Lengths and page tables are on the GPU; pages have 64 tokens. Launches are timed in CUDA graphs (`perf.harness`) that
cycle through copies of the cache. Peers have no e4m3 caches of one scale on Hopper: over these they are timed with the
conversion of the cache to bf16 that engines make in each layer. Outputs are compared with the formula first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import cute_attn
from perf import program
from perf.harness import Call
from perf.machine import flashinfer, module

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
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
    def work(self) -> dict[str, float]:
        pairs = self.q_len * self.kv_len - self.q_len * (self.q_len - 1) // 2  # of a query token and a key
        flops = 2.0 * self.requests * self.heads * pairs * (2 * LATENT + ROPE)
        return {"gb_per_s": self.num_bytes * 1e-3, "tflops": flops * 1e-6}


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


def planned(library: Any, backend: str, x: Inputs) -> Call:
    w, made = x.w, library.BatchMLAPagedAttentionWrapper(x.workspace, backend=backend)
    indptr = x.bounds(x.table.shape[1])
    dims, dtypes = (w.heads, LATENT, ROPE, PAGE, True, SCALE), (x.q.dtype, x.q.dtype)
    made.plan(x.bounds(w.q_len), indptr, x.table.flatten(), x.lens, *dims, *dtypes)
    parts = x.q.flatten(0, 1).split((LATENT, ROPE), dim=-1)
    return lambda: made.run(*parts, *x.wide().split((LATENT, ROPE), dim=-1)).view(*x.q.shape[:3], LATENT)


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
    "FlashInfer fa3": lambda x: planned(flashinfer("flashinfer.mla"), "fa3", x),
    "FlashInfer fa2": lambda x: planned(flashinfer("flashinfer.mla"), "fa2", x),
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
    sets = inputs(w, device, program.copies(w.num_bytes))
    checked = sorted({0, w.requests - 1})
    want = torch.stack([formula(sets[0], request) for request in checked])

    def check(name: str, call: Call) -> dict[str, float]:
        return {"error": program.difference(call()[checked], want, TOLERANCE, "the formula")}

    return program.beside(w, w.work, CANDIDATES, sets, check, rounds)


if __name__ == "__main__":
    program.measure_rows("latent", __doc__, WORKLOADS, measured)
