"""Latent attention on a GPU: random problems against the formula, and captured graphs under other lengths."""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.gpu import marks
from tests.support.case import poisoned_memory
from tests.support.graphs import cuda_graph
from tests.support.mla_case import MlaCase

pytestmark = marks.SM80

DEVICE = "cuda"
RANDOM = int(os.environ.get("CUTE_ATTN_TEST_MLA", "100"))
REPLAYS = 10
LONGEST = 3000


def random_case(seed: int) -> MlaCase:
    r = random.Random(seed)
    requests, q_len = r.choice((1, 2, 5, 40)), r.choice((0, 1, 1, 2, 8))
    narrow, rope, dtype = r.random() < 0.5, r.choice((0, 64, 64)), r.choice((torch.float16, torch.bfloat16))
    grouped = narrow and r.random() < 0.5
    return MlaCase(
        heads=r.choice((1, 8, 12, 16, 32, 64, 96, 128)),
        q_lens=[q_len or r.randrange(1, 5) for _ in range(requests)],
        kv_lens=[r.choice((0, 1, 64, r.randrange(LONGEST // requests))) for _ in range(requests)],
        page_size=r.choice((1, 7, 16, 32, 64)),
        dtype=dtype,
        device=DEVICE,
        causal=r.random() < 0.8,
        sinks=r.random() < 0.3,
        narrow=narrow,
        rope=rope,
        grouped=grouped,
        wide=grouped and rope > 0 and dtype == torch.bfloat16 and r.random() < 0.5,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random(seed: int) -> None:
    """Right, and bitwise equal in a second call."""
    case = random_case(seed)
    with poisoned_memory():
        found = case.wrapped()
    case.check(found, case.scales)
    again = case.wrapped()
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, again, strict=True))
    if case.causal and not case.grouped:
        case.check(case.trtllm())


@pytest.mark.parametrize("narrow", [False, True])
def test_replays_read_lengths_and_tables(narrow: bool) -> None:
    """A captured call computes what its tensors hold at each replay."""
    case = MlaCase(heads=16, q_lens=(1,) * 8, kv_lens=(500,) * 8, page_size=16, device=DEVICE, narrow=narrow)
    case.check(case.trtllm())  # the first call allocates counters
    torch.cuda.synchronize()
    found, replay = cuda_graph(case.trtllm)
    r = random.Random(0)
    for _ in range(REPLAYS):
        lengths = [r.randrange(501) for _ in range(8)]
        order = torch.randperm(8, device=DEVICE)
        case.made["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        case.made["table"].copy_(case.table[order])
        replay()
        now = MlaCase(heads=16, q_lens=(1,) * 8, kv_lens=lengths, page_size=16, device=DEVICE, narrow=narrow)
        now.made.update(case.made)
        now.check(found)
