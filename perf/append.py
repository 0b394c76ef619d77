"""Appending to paged caches, copied and as NVFP4, beside FlashInfer and our torch operations: `python -m perf.append`.

Launches are timed in CUDA graphs (`perf.harness`), cycling through copies of rows and caches; beside the time stands
the rate at which rows are read and slots written. Every candidate's caches are compared with those that torch
operations write: in every byte for ours, dequantised for a peer, which may round ties otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import cute_attn
from cute_attn.dispatch import append
from cute_attn.request.append import reference
from perf import program
from perf.harness import Call
from perf.machine import flashinfer, require

MAX_COPIES = 64
NVFP4_TOLERANCE = 0.02  # relative difference of dequantised rows: a peer rounds by fp32 quotients
SCALE = 0.01
NVFP4_APPEND = "nvfp4_quantize_append_paged_kv_cache"


@dataclass(frozen=True)
class AppendWorkload:
    """Tokens of bf16 that are appended to pages of requests of one length."""

    stored: str  # "bf16" or "nvfp4"
    requests: int
    tokens: int  # of each request
    heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        shape = f"h{self.heads} d{self.head_dim} page{self.page_size}"
        return f"{self.stored} {shape} {self.requests}x{self.tokens}"

    @property
    def nnz(self) -> int:
        return self.requests * self.tokens

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of rows read and slots written, of keys and values together."""
        written = 2 * 16 if self.stored == "bf16" else 8 + 1  # per 16 elements
        return 2 * self.nnz * self.heads * self.head_dim // 16 * (2 * 16 + written)

    @property
    def work(self) -> dict[str, float]:
        return {"gb_per_s": self.num_bytes * 1e-3}


WORKLOADS = [
    AppendWorkload(stored, requests, tokens)
    for stored in ("bf16", "nvfp4")
    for requests, tokens in ((64, 1), (1, 8192), (64, 128))
]


@dataclass(frozen=True)
class Inputs:
    """Rows, where they go, and caches. `scales`: block scales, of NVFP4."""

    rows: tuple[torch.Tensor, torch.Tensor]
    table: tuple[torch.Tensor, ...]  # request and position of each row, page numbers, their bounds, last lengths
    cache: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor] | None


def inputs(w: AppendWorkload, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(2, w.nnz, w.heads, w.head_dim, device=device, generator=generator).bfloat16()
    pages = -(-w.tokens // w.page_size)
    num_pages, in_page = w.requests * pages, (w.page_size, w.heads)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    order = torch.randperm(num_pages, generator=generator, **ints)
    bounds = torch.arange(w.requests + 1, **ints)
    lens = torch.full((w.requests,), w.tokens, **ints)
    places = cute_attn.get_batch_indices_positions(bounds * w.tokens, lens, w.nnz)
    last = torch.full((w.requests,), (w.tokens - 1) % w.page_size + 1, **ints)
    table = (*places, order, bounds * pages, last)
    if w.stored == "bf16":
        cache = torch.zeros(2, num_pages, *in_page, w.head_dim, dtype=torch.bfloat16, device=device)
        return Inputs((rows[0], rows[1]), table, (cache[0], cache[1]), None)
    data = torch.zeros(2, num_pages, *in_page, w.head_dim // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(2, num_pages, *in_page, w.head_dim // 16, dtype=torch.float8_e4m3fn, device=device)
    return Inputs((rows[0], rows[1]), table, (data[0], data[1]), (scales[0], scales[1]))


def call(library: Any, x: Inputs) -> Call:
    """Returns a call of a library's append function, ours or FlashInfer's."""
    places, table = x.table[:2], x.table[2:]
    if x.scales is None:
        return lambda: library.append_paged_kv_cache(*x.rows, *places, x.cache, *table)
    require(hasattr(library, NVFP4_APPEND), f"it has no {NVFP4_APPEND}")
    function = getattr(library, NVFP4_APPEND)
    scale = torch.full((1,), SCALE, device=x.rows[0].device)
    return lambda: function(*x.rows, *places, x.cache, x.scales, *table, scale, scale)


def by_torch(x: Inputs) -> Call:
    def run() -> None:
        with mock.patch.object(append, "run", reference):
            write()

    write = call(cute_attn, x)
    return run


CANDIDATES: dict[str, Callable[[Inputs], Call]] = {
    "cute_attn": lambda x: call(cute_attn, x),
    "torch": by_torch,
    "flashinfer": lambda x: call(flashinfer("flashinfer"), x),
}


def values(x: Inputs) -> torch.Tensor:
    """Returns what the caches hold, as numbers."""
    if x.scales is None:
        return torch.stack(x.cache).double()
    scale = torch.full((1,), SCALE, device=x.rows[0].device)
    halves = zip(x.cache, x.scales, strict=True)
    return torch.stack([cute_attn.nvfp4_kv_dequantize(*half, scale, torch.float32) for half in halves]).double()


def why_wrong(name: str, x: Inputs, want: torch.Tensor) -> str | None:
    """Returns why what a candidate has written is wrong, or None."""
    found = values(x)
    if torch.equal(found, want):
        return None
    error = float((found - want).norm() / want.norm())
    if name == "flashinfer" and x.scales is not None and error <= NVFP4_TOLERANCE:
        return None
    return f"wrong: relative difference {error:.2e} to what torch operations write"


def measured(w: AppendWorkload, device: torch.device, rounds: int) -> dict[str, Any]:
    sets = [inputs(w, device, seed) for seed in range(min(program.copies(w), MAX_COPIES))]
    by_torch(sets[0])()
    want = values(sets[0])

    def check(name: str, call: Call) -> dict[str, Any]:
        for half in (*sets[0].cache, *(sets[0].scales or ())):
            half.view(torch.uint8).zero_()
        call()
        wrong = why_wrong(name, sets[0], want)
        require(wrong is None, wrong or "")
        return {}

    return {**program.beside(w, CANDIDATES, sets, check, rounds), "bytes": w.num_bytes}


if __name__ == "__main__":
    raise SystemExit(program.measure_rows("append", __doc__, WORKLOADS, measured))
