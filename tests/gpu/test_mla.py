"""Latent attention on a GPU: random problems against the formula, and captured graphs under other lengths."""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.gpu import marks
from tests.support.case import poisoned_memory
from tests.support.graphs import cuda_graph
from tests.support.mla_case import MlaCase, random_case

pytestmark = marks.GPU

DEVICE = "cuda"
RANDOM = int(os.environ.get("CUTE_ATTN_TEST_MLA", "100"))
REPLAYS = 10
LONGEST = 3000


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random(seed: int) -> None:
    """Right, and bitwise equal in a second call."""
    r = random.Random(seed)
    case = random_case(r, 40, LONGEST, heads=r.choice((1, 8, 12, 16, 32, 64, 96, 128)), device=DEVICE)
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
