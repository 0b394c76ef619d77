"""Decode over paged caches of 16, 8 and 4 bits on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn import xqa_batch_decode_with_kv_cache
from cute_attn.request.decode import COUNTER_BYTES
from cute_attn.runtime.arch import for_device
from tests.gpu import marks
from tests.support.case import poisoned_memory
from tests.support.graphs import cuda_graph
from tests.support.xqa_case import Built, XqaCase, build, random_case
from tests.support.xqa_producer import STALE, Producer

DEVICE = "cuda"
HAS_FP8_OUTPUT = marks.CAPABILITY >= (9, 0)
pytestmark = marks.GPU
HOPPER = pytest.mark.skipif(not HAS_FP8_OUTPUT, reason="programmatic dependent launch needs compute capability 9.0")

RANDOM = int(os.environ.get("CUTE_ATTN_TEST_XQA", "300"))
REPLAYS = 30
LONGEST = 6000
UNWRITTEN = 0xFF  # every float of such bytes is NaN

Pair = tuple[torch.Tensor, torch.Tensor]


def decode(built: Built, **changes: Any) -> Pair:
    return xqa_batch_decode_with_kv_cache(**(built.arguments | changes))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def assert_same_bits(a: Pair, b: Pair) -> None:
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def ready(case: XqaCase) -> Built:
    """On the device, with NaN where partial results will be."""
    built = build(case, DEVICE)
    built.arguments["workspace_buffer"][COUNTER_BYTES:] = UNWRITTEN
    return built


def assert_right(case: XqaCase) -> None:
    """Right with NaN in every unwritten byte, bitwise equal in a second call, and counters left at zero."""
    built = ready(case)
    with poisoned_memory():
        out, lse = decode(built)
    assert built.check(out, lse) == "", case
    first = out.clone(), lse.clone()
    if case.out is not None:
        bits(out).fill_(UNWRITTEN)
    assert_same_bits(decode(built), first)
    assert not built.arguments["workspace_buffer"][:COUNTER_BYTES].any()


# ---- random problems, a kernel a test

FORMATS = [  # of q, of the cache
    *(("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3"), ("fp16", "e5m2"), ("bf16", "nvfp4")),
    *(("fp16", "e4m3"), ("bf16", "e5m2"), ("fp16", "nvfp4")),
]
OTHER_DIMS = [  # of two warps, narrow, and padded; with formats of q and of the cache
    *((512, q, kv) for q, kv in FORMATS),
    *((32, "bf16", "bf16"), (32, "bf16", "e4m3"), (32, "fp16", "e5m2")),
    *((72, "bf16", "bf16"), (96, "fp16", "fp16"), (80, "bf16", "e4m3"), (112, "fp16", "e5m2"), (192, "bf16", "e4m3")),
    *((304, "fp16", "fp16"), (320, "bf16", "e4m3"), (16, "bf16", "bf16")),
]
SHAPES = [
    *((head_dim, q_len, *formats) for head_dim, q_len, formats in itertools.product((64, 128, 256), (1, 4), FORMATS)),
    *((head_dim, q_len, q, kv) for q_len, (head_dim, q, kv) in itertools.product((1, 4), OTHER_DIMS)),
]


def output(index: int, head_dim: int) -> str | None:
    """A third of the kernels write e4m3, whose rows must be multiples of 16 bytes."""
    return "e4m3" if index % 3 == 2 and head_dim % 16 == 0 else None


KERNELS = [
    XqaCase((), q=q, kv=kv, head_dim=head_dim, q_len=q_len, mask=i % 2 == 1, out=output(i, head_dim))
    for i, (head_dim, q_len, q, kv) in enumerate(SHAPES)
]


def case_of(kernel: XqaCase, seed: int) -> XqaCase:
    """A random problem for the kernel with these dtypes, head_dim, kind of mask, and block of query rows."""
    several = kernel.q_len > 1
    drawn = next(
        case
        for case in (random_case(seed + 1_000_000 * k, longest=LONGEST) for k in itertools.count())
        if (case.q_len * case.heads[0] // case.heads[1] > 8) == several
    )
    narrow = kernel.kv == "nvfp4"  # its numbers are larger
    return dataclasses.replace(
        drawn,
        q=kernel.q,
        kv=kernel.kv,
        head_dim=kernel.head_dim,
        mask=kernel.mask,
        out=kernel.out if HAS_FP8_OUTPUT else None,
        bmm1_scale=(drawn.bmm1_scale or 0.05) * 0.1 if narrow else drawn.bmm1_scale,
        enable_pdl=(None, True, False)[seed % 3],
    )


def name_of(kernel: XqaCase) -> str:
    parts = kernel.q, kernel.kv, str(kernel.head_dim), f"rows{8 if kernel.q_len == 1 else 16}", kernel.out
    return "-".join(part for part in (*parts, "tree" if kernel.mask else None) if part)


@pytest.mark.parametrize("index", range(len(KERNELS)), ids=lambda i: name_of(KERNELS[i]))
def test_random(index: int) -> None:
    for seed in range(index, RANDOM, len(KERNELS)):
        assert_right(case_of(KERNELS[index], seed))


EDGES = tuple(page + d for page in (16, 32, 64, 128, 256) for d in (-1, 0, 1))
LARGE = (
    XqaCase((0, 1, 2, *EDGES), kv="e4m3", heads=(32, 8)),
    XqaCase((0, 1, 2, *EDGES), kv="nvfp4", heads=(16, 4), page_size=32, kv_layout="HND", bmm1_scale=0.002),
    XqaCase((0, 1, 2, *EDGES), heads=(64, 8), page_size=64, sinks=True),
    XqaCase((131072,), heads=(8, 2)),
    XqaCase((131072,), kv="e4m3", heads=(8, 2), page_size=64, form="tensor"),
    XqaCase((131072, 0, 7), kv="nvfp4", heads=(4, 1), page_size=128, bmm1_scale=0.002),
    XqaCase((131071, 5, 70000), kv="fp16", q="fp16", heads=(8, 1), head_dim=64),
    XqaCase((100000, 1, 131072), kv="e5m2", q="fp16", heads=(4, 1), window_left=90000),
    XqaCase((65537,), kv="e4m3", heads=(4, 1), head_dim=256, q_len=4),
    XqaCase((0, 1, 2, *EDGES, 65537), heads=(32, 4), head_dim=512, page_size=32),
    XqaCase((0, 1, 2, *EDGES, 65537), kv="e4m3", heads=(32, 4), head_dim=512, page_size=64, q_len=4),
    XqaCase((0, 1, 2, *EDGES, 9000), kv="e4m3", heads=(16, 4), head_dim=32, page_size=64),
    XqaCase(tuple(128 + 331 * i for i in range(64)), kv="e4m3", heads=(4, 1)),
    XqaCase((700,) * 600, kv="e4m3", heads=(4, 2), page_size=64),
)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case.kv}-{len(case.seq_lens)}x{max(case.seq_lens)}")
def test_large(case: XqaCase) -> None:
    assert_right(case)


# ---- CUDA graphs

GRAPHED = (
    XqaCase((3000,) * 8, kv="e4m3", heads=(8, 2), sinks=True, device_scales=True),
    XqaCase((5000, 3000), heads=(8, 2), page_size=64, window_left=1000),
    XqaCase((2000,) * 40, kv="nvfp4", heads=(4, 1), bmm1_scale=0.002),
    XqaCase((2000,) * 5, kv="e4m3", heads=(16, 2), head_dim=512),
    XqaCase((1500,) * 3, kv="fp16", q="fp16", heads=(4, 2), head_dim=64, q_len=4, mask=True),
)


def with_lengths(built: Built, seq_lens: tuple[int, ...]) -> Built:
    """The same tensors, the lengths on the device overwritten."""
    built.arguments["seq_lens"].copy_(torch.tensor(seq_lens, dtype=torch.int32))
    keys, values = ([x[:n] for x, n in zip(rows, seq_lens, strict=True)] for rows in (built.keys, built.values))
    case = dataclasses.replace(built.case, seq_lens=seq_lens)
    return dataclasses.replace(built, case=case, keys=keys, values=values)


def lengths_of(case: XqaCase, seed: int) -> tuple[int, ...]:
    r = random.Random(seed)
    return tuple(r.choice([0, 1, 16, n, r.randrange(n + 1), r.randrange(n + 1)]) for n in case.seq_lens)


@pytest.mark.parametrize("case", GRAPHED, ids=lambda case: case.kv)
def test_replays_with_other_lengths(case: XqaCase) -> None:
    built = ready(case)
    decode(built)
    (out, lse), replay = cuda_graph(lambda: decode(built))
    for seed in range(REPLAYS):
        now = with_lengths(built, lengths_of(case, seed))
        bits(out).fill_(UNWRITTEN)
        replay()
        assert now.check(out, lse) == "", now.case
        replayed = out.clone(), lse.clone()
        assert_same_bits(decode(built), replayed)


# ---- programmatic dependent launch

PRODUCED = (
    XqaCase((2500, 1, 40, 900), heads=(8, 2), device_scales=True),
    XqaCase((2500, 1, 40, 900), kv="e4m3", heads=(8, 2), device_scales=True),
    XqaCase((2500, 1, 40, 900), kv="nvfp4", heads=(8, 2), device_scales=True, bmm1_scale=0.002),
)
PAUSES = 30  # of a microsecond, while the kernel that depends on the producer is there and must wait


def producer_of(built: Built, pauses: int = PAUSES) -> Producer:
    return Producer(built, for_device(0).name, pauses)


def captured(built: Built, enable_pdl: bool, links: int) -> tuple[torch.cuda.CUDAGraph, list[Pair], Producer]:
    """The producer, then calls of which each takes the output of the one before as its query."""
    producer, results = producer_of(built), []
    producer.write()  # what is loaded or compiled must not be in a capture
    decode(built, enable_pdl=enable_pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        producer.spoil()
        producer.write()
        query = built.arguments["query"]
        for _ in range(links):
            results.append(decode(built, query=query, enable_pdl=enable_pdl))
            query = results[-1][0]
    return graph, results, producer


@HOPPER
@pytest.mark.parametrize("case", PRODUCED, ids=lambda case: case.kv)
@pytest.mark.parametrize("links", [1, 6])
def test_dependent_launches_wait_for_what_they_read(case: XqaCase, links: int) -> None:
    """Bitwise equal with and without programmatic dependent launch, in every replay."""
    built = ready(case)
    plain, expected, _ = captured(built, False, links)
    plain.replay()
    assert built.check(*expected[0]) == ""
    graph, results, producer = captured(built, True, links)
    for _ in range(REPLAYS):
        for out, lse in results:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        graph.replay()
        for result, wanted in zip(results, expected, strict=True):
            assert_same_bits(result, wanted)
    producer.check()


@HOPPER
@pytest.mark.parametrize("case", PRODUCED, ids=lambda case: case.kv)
def test_the_stream_without_a_graph(case: XqaCase) -> None:
    built = ready(case)
    expected = decode(built, enable_pdl=False)
    assert built.check(*expected) == ""
    producer = producer_of(built)
    for _ in range(REPLAYS):
        producer.spoil()
        producer.write()
        assert_same_bits(decode(built, enable_pdl=True), expected)


@HOPPER
def test_a_dependent_launch_starts_while_its_producer_pauses() -> None:
    """Otherwise the tests above prove nothing: a launch that does not wait reads what the producer will replace."""
    producer = producer_of(ready(PRODUCED[0]), 20 * PAUSES)
    for _ in range(2):  # the first loads the kernel
        producer.spoil()
        found = producer.write_and_read_at_once()
        torch.cuda.synchronize()
    assert (found == STALE).all()
    producer.check()


def test_a_capacity_of_zero_pages() -> None:
    """A page table without columns: no key is visible, whatever the lengths are."""
    built = ready(XqaCase((4, 5), heads=(4, 2)))
    out, lse = decode(built, block_tables=torch.empty(2, 0, dtype=torch.int32, device=DEVICE))
    assert not out.any()
    assert np.isneginf(lse.cpu().numpy()).all()
