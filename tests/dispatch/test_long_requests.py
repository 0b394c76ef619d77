"""For which lengths of decode requests "auto" takes XQA over 16-bit caches of head dimension 128 on Hopper."""

from __future__ import annotations

import numpy as np
import torch

from cute_attn.dispatch import select
from cute_attn.dispatch.capabilities import Load
from cute_attn.problem import BatchLengths, Features, Settings
from cute_attn.runtime.arch import named

BF16, E4M3, HOPPER = torch.bfloat16, torch.float8_e4m3fn, named("sm_90a")
FEATURES = Features(torch.device("cuda"), BF16, BF16, BF16, 32, 8, 128, 128, kv_source="paged", decode=True)


def lengths_of(kv_lens: list[int]) -> BatchLengths:
    starts = np.arange(len(kv_lens) + 1)
    return BatchLengths(starts, starts[:-1], np.array(kv_lens, np.int64))


def test_requests_that_need_a_split_are_for_xqa() -> None:
    for changes, window, arch, rows, mean, taken in (
        ({}, -1, HOPPER, 4, 96, "xqa"),  # 4 keys for each of the 24 pairs
        ({}, -1, HOPPER, 4, 95, "fa2"),
        ({}, 95, HOPPER, 4, 8192, "xqa"),
        ({}, 94, HOPPER, 4, 8192, "fa2"),
        ({}, -1, HOPPER, 16, 8192, "xqa"),
        ({}, -1, HOPPER, 17, 8192, "fa2"),
        ({}, -1, named("sm_80"), 4, 8192, "fa2"),
        ({"num_kv_heads": 4, "num_qo_heads": 28}, -1, HOPPER, 7, 48, "xqa"),
        ({"num_kv_heads": 4, "num_qo_heads": 28}, -1, HOPPER, 7, 47, "fa2"),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, -1, HOPPER, 4, 8192, "fa2"),
        ({"own_splits": True}, -1, HOPPER, 4, 8192, "fa2"),
    ):
        asked = Settings(FEATURES._replace(**changes), window_left=window)
        load = Load(rows, False, select.needs_no_split(asked, lengths_of([mean - 20, mean + 20, mean])))
        found = select.choose(asked.features, arch=arch, load=load).name
        assert found == taken, (changes, window, arch.name, rows, mean)


def test_lengths_that_the_host_does_not_know_are_for_xqa() -> None:
    assert select.choose(FEATURES, arch=HOPPER, load=Load(4)).name == "xqa"


def test_other_caches_do_not_ask_for_lengths() -> None:
    short = lengths_of([1, 2, 3])
    assert select.needs_no_split(Settings(FEATURES), short)
    assert not select.needs_no_split(Settings(FEATURES), lengths_of([]))
    assert not select.needs_no_split(Settings(FEATURES._replace(kv_dtype=E4M3)), short)
    assert not select.needs_no_split(Settings(FEATURES._replace(decode=False)), short)
