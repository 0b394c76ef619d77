"""Which lengths of decode requests "auto" takes XQA for."""

from __future__ import annotations

import numpy as np
import torch

from cute_attn.dispatch import select
from cute_attn.dispatch.capabilities import Load
from cute_attn.problem import BatchLengths, Features, Settings
from cute_attn.runtime.arch import named

BF16, E4M3, HOPPER = torch.bfloat16, torch.float8_e4m3fn, named("sm_90a")


def lengths_of(kv_lens: list[int]) -> BatchLengths:
    starts = np.arange(len(kv_lens) + 1)
    return BatchLengths(starts, starts[:-1], np.array(kv_lens, np.int64))


def test_long_requests_are_for_xqa() -> None:
    """Over 16-bit caches of head dimension 128 on Hopper; the plan of fa2 costs more host time."""
    features = Features(torch.device("cuda"), BF16, BF16, BF16, 32, 8, 128, 128, kv_source="paged", decode=True)
    settings = Settings(features)
    for changes, window, arch, rows, mean, taken in (
        ({}, -1, HOPPER, 4, 3072, "xqa"),
        ({}, -1, HOPPER, 8, 100000, "xqa"),
        ({}, -1, HOPPER, 4, 3071, "fa2"),
        ({}, 3071, HOPPER, 4, 8192, "xqa"),
        ({}, 3070, HOPPER, 4, 8192, "fa2"),
        ({}, -1, HOPPER, 9, 8192, "fa2"),
        ({}, -1, named("sm_80"), 4, 8192, "fa2"),
        ({"num_kv_heads": 4, "num_qo_heads": 28}, -1, HOPPER, 7, 3209, "xqa"),
        ({"num_kv_heads": 2}, -1, HOPPER, 4, 8192, "fa2"),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, -1, HOPPER, 4, 8192, "fa2"),
        ({"own_splits": True}, -1, HOPPER, 4, 8192, "fa2"),
    ):
        asked = settings._replace(features=features._replace(**changes), window_left=window)
        kv_lens = [mean - 100, mean + 100, mean]
        load = Load(rows, False, select.batch_class(asked, lengths_of(kv_lens)))
        assert select.choose(asked.features, arch=arch, load=load).name == taken, (
            changes,
            window,
            arch.name,
            rows,
            mean,
        )
    assert select.batch_class(settings, lengths_of([])) is None
    assert select.batch_class(settings._replace(features=features._replace(kv_dtype=E4M3)), lengths_of(kv_lens)) is None


def test_few_requests_are_for_xqa() -> None:
    """64 to 128 pairs of a request and a kv head: fa2 splits about one query tile per SM badly."""
    features = Features(torch.device("cuda"), BF16, BF16, BF16, 32, 8, 128, 128, kv_source="paged", decode=True)
    for heads, requests, rows, kv_len, taken in (
        ((32, 8), 8, 4, 1024, "xqa"),
        ((32, 8), 16, 4, 2048, "xqa"),
        ((32, 8), 16, 16, 1024, "xqa"),
        ((32, 8), 16, 17, 1024, "fa2"),
        ((32, 8), 16, 4, 1023, "fa2"),
        ((32, 8), 7, 4, 2048, "fa2"),
        ((32, 8), 17, 4, 2048, "fa2"),
        ((28, 4), 16, 7, 2048, "fa2"),
        ((32, 32), 4, 1, 1024, "xqa"),
    ):
        asked = Settings(features._replace(num_qo_heads=heads[0], num_kv_heads=heads[1]))
        load = Load(rows, False, select.batch_class(asked, lengths_of([kv_len] * requests)))
        assert select.choose(asked.features, arch=HOPPER, load=load).name == taken, (heads, requests, rows, kv_len)
