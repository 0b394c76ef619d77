"""`integrations.distributed` on four ranks over gloo, of which some cases use two, and on two GPUs over NCCL."""

from __future__ import annotations

import functools

import pytest
import torch

from cute_attn import ArgumentError
from cute_attn.integrations import distributed
from cute_attn.integrations.distributed import ring
from cute_attn.integrations.distributed.ranks import Ranks
from cute_attn.integrations.distributed.zigzag import chunk_lengths
from tests.support import distributed_cases
from tests.support.executors import GPU_MARKS

RANKS = {"cpu": 4, "cuda": 2}
TWO_GPUS = *GPU_MARKS, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CASES = [
    pytest.param(device, case, marks=TWO_GPUS if device == "cuda" else ())
    for device in RANKS
    for case in distributed_cases.cases(device)
]


outcomes = functools.cache(distributed_cases.outcomes)


@pytest.mark.parametrize(("device", "case"), CASES)
def test_on_ranks(device: str, case: str) -> None:
    outcome = outcomes(RANKS[device], device)[case]
    if outcome != distributed_cases.PASSED:
        pytest.fail(outcome, pytrace=False)


@pytest.mark.parametrize("length", [48, 41, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_of_a_ring_cover_the_causal_mask(world_size: int, length: int) -> None:
    """Every visible pair of tokens is computed once; with equal chunks, every step is the same work on every rank."""
    chunks = chunk_lengths(length, world_size)
    parts = torch.arange(length).split(chunks)
    tokens = [torch.cat((parts[r], parts[-1 - r])) for r in range(world_size)]
    computed = torch.zeros(length, length, dtype=torch.int32)
    work = set()
    for r in range(world_size):
        computed[tokens[r][:, None], tokens[r]] += torch.ones(len(tokens[r]), len(tokens[r])).tril().int()
        for source in set(range(world_size)) - {r}:
            rows, keys = ring.visible(chunks, True, r, source)
            pairs = tokens[r][rows][:, None], tokens[source][keys]
            computed[pairs] += 1
            work.add(len(pairs[0]) * len(pairs[1]))
    assert torch.equal(computed, torch.ones(length, length, dtype=torch.int32).tril())
    assert len(work) <= 1 or length % (2 * world_size)


def test_a_ring_of_cpu_tensors_starts_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: pytest.fail("it would make a CUDA context"))
    kv = torch.zeros(2, 1, 64), torch.zeros(2, 1, 64)
    assert [*ring.around_the_ring(kv, [2], Ranks(None, 0, 1))] == [kv]


def test_without_process_group() -> None:
    x = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"call torch\.distributed\.init_process_group first"):
        distributed.ring_prefill(x, x, x)
