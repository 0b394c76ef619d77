"""Causal attention of one long sequence over several GPUs, or over two CPU processes.

Each rank holds two chunks of the sequence (zig-zag) and sends its keys and values around the ring while it attends to
those that it has. Ulysses exchanges tokens for heads instead. Both results are compared with attention in one place.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.distributed as dist

import cute_attn
from cute_attn.integrations import distributed

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def rank(index: int, world_size: int, folder: str, tokens: int) -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", index) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=index, world_size=world_size)

    generator = torch.Generator().manual_seed(0)  # the same whole sequence on every rank, for the comparison
    shape = tokens, HEADS + 2 * KV_HEADS, HEAD_DIM
    qkv = torch.randn(*shape, generator=generator).to(device, torch.bfloat16)
    whole = cute_attn.single_prefill_with_kv_cache(*qkv.split([HEADS, KV_HEADS, KV_HEADS], 1), causal=True)

    def compared(name: str, own: torch.Tensor, expected: torch.Tensor, start: float) -> None:
        if on_gpus:
            torch.cuda.synchronize()
        error = ((own - expected).abs().max() / whole.abs().max()).item()
        seconds = time.perf_counter() - start
        line = f"rank {index}: {name} of {own.shape[0]} of {tokens} tokens, {seconds:.2f} s, error {error:.1e}\n"
        print(line, end="", flush=True)  # at once: ranks share the terminal
        assert error < 2**-6

    start = time.perf_counter()
    q, k, v = distributed.shard_zigzag(qkv).split([HEADS, KV_HEADS, KV_HEADS], 1)
    out = distributed.ring_prefill(q, k, v, causal=True, seq_len=tokens)
    compared("ring", out, distributed.shard_zigzag(whole), start)

    start = time.perf_counter()
    per_rank = [len(part) for part in whole.tensor_split(world_size)]
    q, k, v = qkv.tensor_split(world_size)[index].split([HEADS, KV_HEADS, KV_HEADS], 1)
    out = distributed.ulysses_attention(q, k, v, causal=True, tokens_per_rank=per_rank)
    compared("ulysses", out, whole.tensor_split(world_size)[index], start)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or two processes on the CPU")
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    ranks = options.ranks or torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, args=(ranks, folder, options.tokens), nprocs=ranks)


if __name__ == "__main__":
    main()
