"""Cases of `cute_attn.integrations.distributed`, called by every rank, on CPUs and on GPUs, and what starts the ranks.

Every rank makes the whole problem from the same seed, and compares its part of the result with the fp64 oracle over the
problem that is not sharded.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cute_attn
from cute_attn import ArgumentError, ArgumentTypeError, NotPlannedError, NotSupported, emulator
from cute_attn.integrations import aten_flash, distributed
from tests.support import subprocesses
from tests.support.dense_attention import attention, random, seen
from tests.support.engine_case import BF16, Batch, Tokens
from tests.support.refused_calls import Row, raises

LN2 = math.log(2)
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def randn(*shape: int, device: torch.device, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return random(*shape, dtype=dtype, device=str(device), seed=seed + sum(shape))


def operands(device: torch.device, length: int, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Any:
    """q, k and v of a sequence; `shape`: heads, kv heads, and head dimensions of k and of v."""
    sizes = (shape[0], shape[2]), (shape[1], shape[2]), (shape[1], shape[3])
    return [randn(length, *size, device=device, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


def of_kernels(device: torch.device) -> float:
    """Rounding of probabilities to q's dtype, which the CPU's reference does not do."""
    return 2**-8 if device.type == "cuda" else 0.0


def close(found: torch.Tensor, expected: Any, rounding: float) -> None:
    """Compare element by element; `rounding`: relative, of the largest magnitude that is rounded."""
    expected = torch.as_tensor(expected)
    scale = max(1.0, float(expected[expected.isfinite()].abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=0, atol=rounding * scale)


def assert_refused(call: Any, *rows: Row) -> None:
    """A call is refused with the arguments of each row."""
    for row in rows:
        with raises(row):
            call(**row[0])


@functools.lru_cache
def group_of_two() -> Any:
    return dist.new_group([0, 1])


def in_pair(case: Any, **options: Any) -> Any:
    """A case for ranks 0 and 1 alone; `group` is None where they are all ranks."""

    def run(device: torch.device) -> None:
        group = None if dist.get_world_size() == 2 else group_of_two()  # which all ranks must make
        if dist.get_rank() < 2:
            case(device, group, **options)

    return run


def of_all(case: Any, **options: Any) -> Any:
    return lambda device: case(device, None, **options)


# ---- sharded decode


def shard_pages(lengths: list[int], page_size: int, ranks: int, placement: str) -> list[list[list[int]]]:
    """Positions of the tokens of each request on each rank."""
    if placement == "round robin":
        pages = [[list(range(n))[i : i + page_size] for i in range(0, n, page_size)] for n in lengths]
        return [[list(itertools.chain(*of_request[r::ranks])) for of_request in pages] for r in range(ranks)]
    if placement == "contiguous":
        return [
            [part.tolist() for part in (np.array_split(np.arange(n), ranks)[r] for n in lengths)] for r in range(ranks)
        ]
    assert placement == "all on the last rank"
    return [[list(range(n)) if r == ranks - 1 else [] for n in lengths] for r in range(ranks)]


class Shards:
    """A batch whose keys are spread over ranks, and this rank's paged cache of them."""

    def __init__(self, device: torch.device, group: Any, placement: str, lengths: list[int], **formats: Any) -> None:
        batch = Batch([1] * len(lengths), lengths, **{"dim": 64, "page_size": 4, **formats})
        self.whole = Tokens(batch, str(device))
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        own = [torch.tensor(x).long() for x in shard_pages(lengths, batch.page_size, ranks, placement)[rank]]
        keys, values = ([x[i] for x, i in zip(side, own, strict=True)] for side in (self.whole.keys, self.whole.values))
        self.tokens = Tokens(dataclasses.replace(batch, kv_lens=[*map(len, own)]), str(device), keys, values)
        self.q, self.cache = self.whole.q, self.tokens.caches()

    def plan(self, wrapper: Any, **options: Any) -> None:
        batch, tokens = self.tokens.batch, self.tokens
        wrapper.plan(
            *(tokens.kv_indptr, tokens.kv_indices, tokens.last_page_len, *batch.heads, batch.dim, batch.page_size),
            **{"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype, **options},
        )

    def expected(self, sm_scale: float | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.whole.expected(sm_scale or self.whole.batch.dim**-0.5, **options)


def wrapper_on(device: torch.device, group: Any, **options: Any) -> Any:
    workspace = torch.zeros(32 << 20, dtype=torch.uint8, device=device)
    return distributed.ShardedBatchDecodeWithPagedKVCacheWrapper(workspace, group=group, **options)


def decode(device: torch.device, group: Any, *, placement: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """All ranks return the same bits."""
    shards = Shards(device, group, placement, [37, 1, 8, 0, 100], kv_dtype=dtype)
    wrapper = wrapper_on(device, group)
    sinks = randn(4, device=device, dtype=torch.float32) * 3
    rounding = of_kernels(device) + (0 if dtype == torch.bfloat16 else 2**-8)  # of partial outputs
    for given in (None, sinks):
        for o_dtype in (torch.bfloat16, torch.float32):
            shards.plan(wrapper, o_data_type=o_dtype)
            out, lse = wrapper.run_return_lse(shards.q, shards.cache, sinks=given)
            o, s = shards.expected(sinks=given)
            assert out.dtype == o_dtype
            close(out, o, ROUNDING[o_dtype] + rounding)
            close(lse, s, 2**-16)
            others = [torch.empty_like(out) for _ in range(dist.get_world_size(group))]
            dist.all_gather(others, out, group=group)
            assert all(torch.equal(out, other) for other in others)


def decode_options(device: torch.device, group: Any) -> None:
    """Soft cap, scale, natural lse, scales of the run, and outputs of the caller."""
    shards = Shards(device, group, "round robin", [30, 9], heads=(6, 1), dim=72, page_size=1)
    wrapper = wrapper_on(device, group)
    shards.plan(wrapper, logits_soft_cap=2.0, sm_scale=0.3, lse_base="ln", o_data_type="float32")
    out = torch.full((2, 6, 72), torch.nan, device=device)
    lse = torch.full((2, 6), torch.nan, device=device)
    assert wrapper.run(shards.q, shards.cache, v_scale=0.5, out=out, lse=lse) is out
    o, s = shards.expected(sm_scale=0.3, soft_cap=2.0)
    close(out, o / 2, 2**-18 + of_kernels(device))
    close(lse, s * LN2, 2**-16)


def decode_replayed(device: torch.device, group: Any) -> None:
    """A run that is captured once, on a GPU, and replayed after plans of other lengths; on a CPU it runs again."""
    batches = [
        Shards(device, group, "round robin", lengths, seed=7) for lengths in ([60, 2, 9], [1, 77, 0], [8, 8, 90])
    ]
    pages = max(shards.tokens.num_pages for shards in batches)
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    buffers = {"indptr": ints(4), "indices": ints(pages), "last_page_len": ints(3)}
    wrapper = wrapper_on(
        device, group, use_cuda_graph=True, **{f"paged_kv_{name}_buffer": x for name, x in buffers.items()}
    )
    q, cache = torch.zeros_like(batches[0].q), tuple(x.new_zeros(pages, *x.shape[1:]) for x in batches[0].cache)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    run = functools.partial(wrapper.run, q, cache, out=out, lse=lse)
    for i, shards in enumerate(batches):
        shards.plan(wrapper)
        q.copy_(shards.q)
        for target, source in zip(cache, shards.cache, strict=True):
            target[: len(source)] = source
        if i == 0:
            run()
            run = captured(run) if device.type == "cuda" else run
        run()
        o, s = shards.expected()
        close(out, o, 2**-8 + of_kernels(device))
        close(lse, s, 2**-16)

    with pytest.raises(ArgumentError, match="o_data_type must stay 'bfloat16' with use_cuda_graph=True, got 'float32'"):
        batches[0].plan(wrapper, o_data_type="float32")
    with pytest.raises(ArgumentError, match="the batch size must stay 3"):
        Shards(device, group, "round robin", [4, 4]).plan(wrapper)


def captured(run: Any) -> Any:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events meanwhile
        run()
    return graph.replay


def decode_errors(device: torch.device, group: Any) -> None:
    shards = Shards(device, group, "contiguous", [9, 4])
    wrapper, q, cache = wrapper_on(device, group), shards.q, shards.cache
    run = functools.partial(wrapper.run, q, cache)
    assert_refused(run, ({}, r"plan\(\) must come before run\(\)", NotPlannedError))
    assert_refused(
        functools.partial(shards.plan, wrapper),
        *(
            ({option: value}, f"refuses {option}={value!r}: a rank knows its tokens", NotSupported)
            for option, value in (("window_left", 3), ("q_len_per_req", 2), ("pos_encoding_mode", "ALIBI"))
        ),
        ({"kv_data_type": 3}, r"kv_data_type must be a torch\.dtype or its name, got 3", ArgumentTypeError),
        ({"o_data_type": "float8_e4m3fn"}, "o_data_type must have dtype float16 or bfloat16 or float32"),
    )
    shards.plan(wrapper)
    memory, own = torch.zeros_like(q), wrapper._local._float_workspace_buffer
    in_memory, in_own = (x.view(-1).view(torch.float32)[:8].view(2, 4) for x in (memory, own[:32]))
    assert_refused(
        run,
        ({"out": torch.empty(2, 4, 64, device=device)}, "out must have dtype bfloat16"),
        ({"lse": torch.empty(4, 2, device=device).t()}, "lse must be contiguous"),
        ({"out": q}, "out must not share memory with q"),
        ({"out": cache[1].view(-1)[: q.numel()].view(q.shape)}, "out must not share memory with v"),
        ({"out": memory, "lse": in_memory}, "lse must not share memory with out"),
        ({"lse": in_own}, "lse must not share memory with the workspace"),
        ({"sinks": torch.zeros(3, device=device)}, r"sinks must have shape \[num_qo_heads\]"),
    )
    assert_refused(functools.partial(wrapper_on, device), ({"group": "all"}, "group must be a", ArgumentTypeError))


def page_shards(device: torch.device, group: Any) -> None:
    """Counts and places of round-robin pages are those of pages dealt out one by one."""
    lengths = torch.tensor([0, 1, 4, 5, 8, 9, 31, 97], device=device)
    for world_size in (1, 2, 3):
        dealt = shard_pages(lengths.tolist(), 4, world_size, "round robin")
        for rank in range(world_size):
            counts = distributed.shard_kv_lens(lengths, 4, rank, world_size)
            assert counts.tolist() == [len(tokens) for tokens in dealt[rank]]
        owner, place = distributed.shard_positions(torch.arange(97, device=device), 4, world_size)
        assert all(dealt[r][-1][i] == t for t, (r, i) in enumerate(zip(owner.tolist(), place.tolist(), strict=True)))
    with pytest.raises(ArgumentError, match=r"rank must be in 0\.\.1, got 2"):
        distributed.shard_kv_lens(lengths, 4, 2, 2)


# ---- ring prefill


def zigzag(device: torch.device, group: Any) -> None:
    ranks = dist.get_world_size(group)
    for length in (0, 1, 2 * ranks, 2 * ranks + 1, 41):
        x = torch.arange(3 * length, device=device).reshape(3, length).to(torch.bfloat16)
        own = distributed.shard_zigzag(x, dim=1, group=group)
        positions = distributed.zigzag_positions(length, device=device, group=group)
        assert torch.equal(own, x[:, positions])
        assert torch.equal(distributed.unshard_zigzag(own, dim=1, seq_len=length, group=group), x)


def ring(device: torch.device, group: Any, *, causal: bool, length: int, **options: Any) -> None:
    shape, dtype = options.pop("shape", (4, 2, 64, 64)), options.pop("dtype", BF16)
    rounding = options.pop("rounding", of_kernels(device))
    if options.pop("sinks", False):
        options["sinks"] = randn(shape[0], device=device, dtype=torch.float32) * 3
    q, k, v = operands(device, length, shape, dtype)
    cap = options.get("logits_soft_cap", 0.0)
    o, s = attention(q, k, v, seen(length, length, causal), soft_cap=cap, sinks=options.get("sinks"))
    own = [distributed.shard_zigzag(x, group=group) for x in (q, k, v)]
    run = functools.partial(distributed.ring_prefill, *own, causal=causal, seq_len=length, group=group, **options)
    out, lse = run(return_lse=True)
    unshard = functools.partial(distributed.unshard_zigzag, seq_len=length, group=group)
    assert out.dtype == dtype
    close(unshard(out), o, ROUNDING[dtype] + rounding)
    close(unshard(lse), s, 2**-16)
    close(unshard(run(o_dtype=torch.float32)), o, 2**-18 + rounding)


def ring_reuses_buffers(device: torch.device, group: Any) -> None:
    with mock.patch("cute_attn.integrations.distributed.ring.BUFFERS", 2):
        ring(device, group, causal=True, length=43)


def kernels_of_a_gpu(device: torch.device, group: Any) -> None:
    """Partial results by fa2's kernels on the emulator, in the places where the exchange and the merge expect them."""
    with emulator.using("sm_80", kernels="fa2", sms=4):
        ring(device, group, causal=True, length=36, shape=(2, 1, 64, 64), backend="emulator", rounding=2**-8)
        shards = Shards(device, group, "round robin", [70, 3], heads=(2, 1))
        wrapper = wrapper_on(device, group, backend="emulator")
        shards.plan(wrapper)
        sinks = randn(2, device=device, dtype=torch.float32)
        close(wrapper.run(shards.q, shards.cache, sinks=sinks), shards.expected(sinks=sinks)[0], 2**-7)


def ring_strided(device: torch.device, group: Any) -> None:
    """q, k and v are views of one tensor, and seq_len is left out."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    qkv = randn(ranks * 8, 8, 64, device=device)
    own = distributed.shard_zigzag(qkv, group=group)
    q, k, v = own.split([4, 2, 2], 1)
    assert not k.is_contiguous()
    out = distributed.ring_prefill(q, k, v, group=group)
    o, _ = attention(*qkv.split([4, 2, 2], 1), seen(ranks * 8, ranks * 8))
    positions = distributed.zigzag_positions(ranks * 8, group=group)
    assert positions.tolist() == [
        *range(4 * rank, 4 * rank + 4),
        *range(8 * ranks - 4 * rank - 4, 8 * ranks - 4 * rank),
    ]
    close(out, torch.as_tensor(o)[positions], 2**-7)


def ring_errors(device: torch.device, group: Any) -> None:
    q, k = randn(6, 4, 64, device=device), randn(6, 2, 64, device=device)
    ranks = dist.get_world_size(group)
    assert_refused(
        functools.partial(distributed.ring_prefill, q=q, k=k, v=k, group=group),
        ({"k": k[:5]}, "k must have q's 6 tokens"),
        ({"q": q[:5], "k": k[:5], "v": k[:5]}, "q must have an even number of tokens"),
        ({"seq_len": 5 * ranks}, r"q must have the 5 tokens that rank \d of \d holds of seq_len"),
        ({"o_dtype": torch.int8}, "o_dtype must have dtype"),
        ({"q": q[..., :32]}, "q and k must have the same head dimension"),  # of the attention call
        ({"causal": 1}, "causal must be True or False", ArgumentTypeError),
    )


# ---- Ulysses


def ulysses(device: torch.device, group: Any, *, shape: tuple[int, ...], uneven: bool = False, **options: Any) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = [7, 0, 12, 3][:ranks] if uneven else [6] * ranks
    length = sum(tokens)
    if options.pop("sinks", False):
        options["sinks"] = randn(shape[0], device=device, dtype=torch.float32) * 3
    q, k, v = operands(device, length, shape)
    start = sum(tokens[:rank])
    own = [x[start : start + tokens[rank]] for x in (q, k, v)]
    per_rank = tokens if uneven else None
    out = distributed.ulysses_attention(*own, tokens_per_rank=per_rank, group=group, **options)
    keep = seen(length, length, options.get("causal", True), options.get("window_left", -1))
    o, _ = attention(q, k, v, keep, sinks=options.get("sinks"))
    close(out, torch.as_tensor(o)[start : start + tokens[rank]], 2**-7)


def ulysses_callable(device: torch.device, group: Any) -> None:
    """A ragged wrapper over two requests attends between the exchanges."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = 6 * ranks
    q, k = randn(length, 8, 64, device=device), randn(length, 4, 64, device=device)
    ends = torch.tensor([0, 7, length], dtype=torch.int32)
    ragged = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(32 << 20, dtype=torch.uint8, device=device))
    ragged.plan(ends, ends, 8 // ranks, 4 // ranks, 64, causal=True, q_data_type=torch.bfloat16)
    own = slice(6 * rank, 6 * rank + 6)
    out = distributed.ulysses_attention(q[own], k[own], k[own], attention=ragged.run, group=group)
    keep = seen(length, length)
    keep[7:, :7] = False
    close(out, torch.as_tensor(attention(q, k, k, keep)[0])[own], 2**-7)


def ulysses_errors(device: torch.device, group: Any) -> None:
    ranks = dist.get_world_size(group)
    q, k = randn(6, 4, 64, device=device), randn(6, 2, 64, device=device)
    one, three, many = k[:, :1], k[:, :1].expand(6, 3, 64), q[:, :1].expand(6, ranks + 1, 64)
    too_many = f"refuses num_kv_heads=3: the query heads of one of {ranks} ranks"
    assert_refused(
        functools.partial(distributed.ulysses_attention, q=q, k=k, v=k, group=group),
        ({"q": many, "k": one, "v": one}, f"refuses num_qo_heads={ranks + 1}: {ranks} ranks cannot", NotSupported),
        ({"q": q[:, :1].expand(6, 12, 64), "k": three, "v": three}, too_many, NotSupported),
        ({"k": k[:5]}, "k must have q's tokens and dtype"),
        ({"tokens_per_rank": [6]}, f"tokens_per_rank must have a number >= 0 for each of {ranks} ranks"),
        ({"tokens_per_rank": [5] * ranks}, "q must have tokens_per_rank"),
        ({"window_left": 3, "attention": print}, "window_left must not be given beside attention"),
    )


# ---- torch's context_parallel


def context_parallel(device: torch.device, group: Any) -> None:
    """torch's own ring calls the aten flash operator once a step: with our function as its kernel, it is right.

    Through `F.scaled_dot_product_attention` it does not run on a CPU, whose operator has no rule for shards.
    """
    from torch.distributed.device_mesh import init_device_mesh  # experimental: their places change with torch
    from torch.distributed.tensor import DTensor, Shard, experimental
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    shape = (2, 4, 8 * dist.get_world_size(), 64)
    q, k, v = (randn(*shape, device=device, seed=i) for i in range(3))
    keep = seen(shape[2], shape[2])
    rows = [attention(*(x[b].transpose(0, 1) for x in (q, k, v)), keep)[0] for b in range(shape[0])]
    expected = torch.stack([torch.as_tensor(o).transpose(0, 1) for o in rows])
    shapes = []

    def flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, **options: Any) -> Any:
        shapes.append((q.shape[2], k.shape[2], is_causal))
        return aten_flash.scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, **options)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.no_grad(), experimental.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        shards = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v)]
        own = torch.ops.aten._scaled_dot_product_flash_attention(*shards, is_causal=True)[0].to_local()
        (out,) = context_parallel_unshard(mesh, [own], [2])
    close(out, expected, 2**-7)  # every partial output is rounded to bf16
    rank = dist.get_rank()
    assert shapes == [(8, 8, True), *[(8, 4, False)] * rank, *[(4, 8, False)] * (dist.get_world_size() - 1 - rank)]


CASES = {
    "pages dealt out": of_all(page_shards),
    **{
        f"decode, {placement}, {size}": wrap(decode, placement=placement)
        for placement in ("round robin", "contiguous", "all on the last rank")
        for size, wrap in (("2 ranks", in_pair), ("4 ranks", of_all))
    },
    "decode, fp8 cache": in_pair(decode, placement="round robin", dtype=torch.float8_e4m3fn),
    "decode, options": in_pair(decode_options),
    "decode, replayed": in_pair(decode_replayed),
    "decode, errors": in_pair(decode_errors),
    "zig-zag, 2 ranks": in_pair(zigzag),
    "zig-zag, 4 ranks": of_all(zigzag),
    "ring, 2 ranks": in_pair(ring, causal=True, length=96),
    "ring, 4 ranks": of_all(ring, causal=True, length=96, dtype=torch.float16),
    "ring, all keys": of_all(ring, causal=False, length=64),
    "ring, uneven": of_all(ring, causal=True, length=45, shape=(6, 1, 64, 72)),
    "ring, uneven, all keys": in_pair(ring, causal=False, length=37),
    "ring, empty chunks": of_all(ring, causal=True, length=5),
    "ring, sinks and soft cap": of_all(ring, causal=True, length=40, sinks=True, logits_soft_cap=3.0),
    "ring, buffers used again": of_all(ring_reuses_buffers),
    "ring, strides": of_all(ring_strided),
    "ring, errors": of_all(ring_errors),
    "ulysses, 2 ranks": in_pair(ulysses, shape=(8, 4, 64, 64)),
    "ulysses, replicated kv heads": of_all(ulysses, shape=(8, 2, 64, 72), causal=False),
    "ulysses, uneven, window and sinks": of_all(ulysses, shape=(4, 1, 64, 64), uneven=True, window_left=5, sinks=True),
    "ulysses, ragged wrapper": of_all(ulysses_callable),
    "ulysses, errors": of_all(ulysses_errors),
}

CPU_CASES = {"torch's context_parallel": of_all(context_parallel), "kernels on the emulator": in_pair(kernels_of_a_gpu)}


def cases(device_type: str) -> dict[str, Any]:
    """Return the cases that run on a type of device."""
    return CASES | CPU_CASES if device_type == "cpu" else CASES


# ---- ranks, each a process on this machine: gloo on CPUs, NCCL on GPUs

PASSED = "passed"
SECONDS = 120  # that a rank waits for another one


def outcomes(world_size: int, device_type: str) -> dict[str, str]:
    """Run all cases; return what became of each: PASSED, or tracebacks by rank. A fresh interpreter imports everything
    once and then forks the ranks: imports cost seconds. CUDA does not survive a fork: ranks on GPUs import for
    themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{world_size}, {device_type!r}, {folder!r}"
        done = subprocesses.python("-c", f"import {__name__} as x; x.start_ranks({arguments})", OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    assert len(reports) == world_size, done.stderr
    names = list(dict.fromkeys(name for report in reports for name in report))
    return {name: _outcome([report.get(name, "not run") for report in reports]) for name in names}


def _outcome(by_rank: list[str]) -> str:
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text != PASSED]
    return "\n".join(failed) or PASSED


def start_ranks(world_size: int, device_type: str, folder: str) -> None:
    """Start the ranks and wait for them."""
    context = multiprocessing.get_context("spawn" if device_type == "cuda" else "fork")
    ranks = [context.Process(target=_rank, args=(rank, world_size, device_type, folder)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def _rank(rank: int, world_size: int, device_type: str, folder: str) -> None:
    """Stop at the first failure; the other ranks stop at what they then miss, and later cases count as not run."""
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device_type == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not to be had on every host
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    report = dict.fromkeys(cases(device_type), "not run")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    for name, case in cases(device_type).items():
        try:
            case(device)
            report[name] = PASSED
        except BaseException:
            report[name] = traceback.format_exc()
            break
    Path(folder, f"rank{rank}.json").write_text(json.dumps(report))
    if all(text == PASSED for text in report.values()):
        dist.destroy_process_group()
    sys.exit()
