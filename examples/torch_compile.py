"""Decode steps of one attention layer under torch.compile(fullgraph=True): append to the cache, then attention.

    python examples/torch_compile.py [--device cuda] [--steps 8]

A plan per step, outside of the compiled function; one graph for all steps. Prints the number of graphs and the largest
difference from eager calls.
"""

from __future__ import annotations

import argparse

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cute_attn

BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 2, 8, 2, 64, 16, 4  # PAGES per request
DTYPE = torch.bfloat16


def main(device: str, steps: int, start: int = 20) -> tuple[int, float]:
    """Run the steps; return the number of graphs and the largest difference."""
    wrapper = cute_attn.BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device=device))
    caches = torch.randn(2, BATCH * PAGES, 2, PAGE, KV_HEADS, HEAD_DIM, device=device).to(DTYPE)
    caches[1] = caches[0]
    indices = torch.arange(BATCH * PAGES, dtype=torch.int32, device=device)
    indptr = torch.arange(BATCH + 1, dtype=torch.int32) * PAGES
    table = indices, indptr.to(device), torch.ones(BATCH, dtype=torch.int32, device=device)
    request = torch.arange(BATCH, dtype=torch.int32, device=device)

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        cute_attn.append_paged_kv_cache(k, v, request, positions, cache, *table)
        return wrapper.run(q * 0.5, cache) + q

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    worst = 0.0
    for step in range(steps):
        length = start + step + 1
        pages = -(-length // PAGE)
        starts = torch.arange(BATCH + 1, dtype=torch.int32) * pages
        used = indices.view(BATCH, PAGES)[:, :pages].flatten()
        last = torch.full((BATCH,), length - (pages - 1) * PAGE, dtype=torch.int32)
        wrapper.plan(starts, used, last, HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=DTYPE)
        q = torch.randn(BATCH, HEADS, HEAD_DIM, device=device).to(DTYPE)
        k, v = torch.randn(2, BATCH, KV_HEADS, HEAD_DIM, device=device).to(DTYPE)
        positions = torch.full((BATCH,), length - 1, dtype=torch.int32, device=device)
        outs = [run(q, k, v, positions, cache) for run, cache in zip((layer, compiled), caches, strict=True)]
        worst = max(worst, (outs[0] - outs[1]).abs().max().item())
    assert torch.equal(*caches)
    return counter.frame_count, worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Decode steps under torch.compile.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    graphs, difference = main(arguments.device, arguments.steps)
    print(f"{arguments.steps} steps, {graphs} graph, largest difference from eager calls {difference}")
