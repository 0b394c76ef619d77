"""Appending to paged caches, copied and as NVFP4, beside FlashInfer and our torch operations: `python -m perf.append`.

Launches are timed in CUDA graphs (`perf.harness`), cycling through copies of rows and caches; beside the time stands
the rate at which rows are read and slots written. Every candidate's caches are compared with those that torch
operations write: in every byte for ours, dequantised for a peer, which may round ties otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cute_attn
from cute_attn.request.append import Append, PageTable, reference
from perf import program
from perf.harness import Call
from perf.machine import flashinfer, require
from perf.workloads import BatchWorkload, equal

MAX_COPIES = 64
NVFP4_TOLERANCE = 0.02  # relative difference of dequantised rows: a peer rounds by fp32 quotients
SCALE = 0.01
NVFP4_APPEND = "nvfp4_quantize_append_paged_kv_cache"

WORKLOADS = [
    equal(requests, tokens, tokens, (8, 8), 128, 16, kv_dtype=stored)
    for stored in ("bfloat16", "nvfp4")
    for requests, tokens in ((64, 1), (1, 8192), (64, 128))
]


def num_bytes(w: BatchWorkload) -> int:
    """Returns the bytes of rows of bf16 read and slots written, of keys and values together."""
    written = 8 + 1 if w.kv_dtype == "nvfp4" else 2 * 16  # per 16 elements
    return 2 * sum(w.kv_lens) * w.num_kv_heads * w.head_dim // 16 * (2 * 16 + written)


@dataclass(frozen=True)
class Inputs:
    """Rows, where they go, and caches. `scales`: block scales, of NVFP4."""

    rows: tuple[torch.Tensor, torch.Tensor]
    table: tuple[torch.Tensor, ...]  # request and position of each row, page numbers, their bounds, last lengths
    cache: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor] | None

    def clear(self) -> None:
        for half in (*self.cache, *(self.scales or ())):
            half.view(torch.uint8).zero_()


def inputs(w: BatchWorkload, device: torch.device, seed: int) -> Inputs:
    x, nnz = w.inputs(device, seed), sum(w.kv_lens)
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(2, nnz, w.num_kv_heads, w.head_dim, device=device, generator=generator).bfloat16()
    bounds, lens, pages, last = (
        torch.tensor(n, dtype=torch.int32, device=device)
        for n in (w.qo_indptr, w.kv_lens, w.kv_indptr, w.last_page_len)
    )
    assert x.indices is not None
    places = cute_attn.get_batch_indices_positions(bounds, lens, nnz)
    made = Inputs((rows[0], rows[1]), (*places, x.indices, pages, last), (x.k, x.v), x.block_scales)
    made.clear()
    return made


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
    stored, scales = "copy" if x.scales is None else "nvfp4", tuple(sf.view(torch.uint8) for sf in x.scales or ())
    scale = torch.full((), SCALE, device=x.rows[0].device)
    rows = Append(x.rows, x.cache, PageTable(*x.table), stored, scales, (scale, scale))
    return lambda: reference(rows)


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


def check(x: Inputs, want: torch.Tensor, name: str, call: Call) -> dict[str, Any]:
    """Appends to empty caches; raises if they do not hold what torch operations write."""
    x.clear()
    call()
    rounds_otherwise = name == "flashinfer" and x.scales is not None
    allowed = NVFP4_TOLERANCE if rounds_otherwise else 0.0
    program.difference(values(x), want, allowed, "what torch operations write")
    return {}


def measured(w: BatchWorkload, device: torch.device, rounds: int) -> dict[str, Any]:
    sets = [inputs(w, device, seed) for seed in range(min(program.copies(num_bytes(w)), MAX_COPIES))]
    by_torch(sets[0])()
    checked = functools.partial(check, sets[0], values(sets[0]))
    work = {"gb_per_s": num_bytes(w) * 1e-3}
    return {**program.beside(w, work, CANDIDATES, sets, checked, rounds), "bytes": num_bytes(w)}


if __name__ == "__main__":
    program.measure_rows("append", __doc__, WORKLOADS, measured)
