"""Plans of batch wrappers, ours or FlashInfer's, whose host time is measured: `perf.overhead`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from perf.batch_peers import WORKSPACE_BYTES
from perf.harness import Call

BATCH_SIZES = (2, 256)
HEADS, HEAD_DIM, PAGE_SIZE, QO_LEN = (32, 8), 128, 16, 100
MOST_PAGES = 500  # of a request
STEPS = 300  # batches that plans take in turn: more than a library remembers schedules of
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def plan_calls(library: Any, device: torch.device, decode: dict[str, Any], prefill: dict[str, Any]) -> dict[str, Call]:
    """Returns plans of few and of many requests, with index arrays on the host and on the device. `decode`, `prefill`:
    options of the wrappers. Lengths differ from call to call: decode requests grow, prompts are others.
    """
    calls: dict[str, Call] = {}
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    for n in BATCH_SIZES:
        indices = torch.zeros(n * MOST_PAGES, dtype=torch.int32, device=device)
        qo_indptr = torch.arange(n + 1, dtype=torch.int32) * QO_LEN
        for place, on in {"host": torch.device("cpu"), "GPU": device}.items():
            growing, others = ([tuple(x.to(on) for x in step) for step in steps] for steps in (grow(n), prompts(n)))
            for name, dtype in KV_DTYPES.items():
                wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **decode)
                turns = [paged(step, indices) for step in growing]
                calls[f"plan, decode of {n} requests, {name}, lengths on the {place}"] = _plan(wrapper, turns, dtype)
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **prefill)
            starts = qo_indptr.to(on)
            turns = [(starts, *paged(step, indices)) for step in others]
            name = f"plan, prefill of {n} requests, lengths on the {place}"
            calls[name] = _plan(wrapper, turns, torch.bfloat16, causal=True)
            if device.type == "cpu":
                break
    return calls


def grow(requests: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields indptr and last_page_len of decode steps, each with one token more per request."""
    most = MOST_PAGES * PAGE_SIZE - STEPS
    lengths = torch.randint(100, most, (requests,), generator=torch.Generator().manual_seed(0))
    for step in range(STEPS):
        yield pages_of(lengths + step)


def prompts(requests: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields indptr and last_page_len of batches that have nothing in common."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield pages_of(torch.randint(QO_LEN, MOST_PAGES * PAGE_SIZE, (requests,), generator=generator))


def pages_of(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns indptr and last_page_len of requests."""
    pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0)))
    return indptr.int(), (lengths - (pages - 1) * PAGE_SIZE).int()


def paged(step: tuple[torch.Tensor, ...], indices: torch.Tensor) -> tuple[Any, ...]:
    """Returns the positional arguments of a plan over pages."""
    indptr, last = step
    return indptr, indices, last, *HEADS, HEAD_DIM, PAGE_SIZE


def _plan(wrapper: Any, turns: list[tuple[Any, ...]], kv: torch.dtype, **options: Any) -> Call:
    turn = itertools.cycle(turns)
    return lambda: wrapper.plan(*next(turn), q_data_type=torch.bfloat16, kv_data_type=kv, **options)
