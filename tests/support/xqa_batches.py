"""Decode through wrappers and functions on the XQA kernel: cases for the emulator and for GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from cute_attn.runtime.arch import named
from tests.support import batch_case
from tests.support.batch_case import E4M3, E5M2, BatchCase, decode, dims, heads

CASES = (
    decode((65, 12, 0), kv_dtype=E4M3, lse_base="ln", **heads(4, 1)),
    decode((65, 12, 0), kv_dtype=E5M2, kv_layout="HND", dtype="bfloat16", **heads(4, 2), **dims(128)),
    decode((33, 1, 0), kv_dtype="nvfp4", kv_layout="HND", cache="strided", k_scale=0.5, **heads(2, 2), **dims(128)),
    decode((33, 40), kv_dtype="nvfp4", cache="one", page_size=3, q_len=3, **heads(4, 2)),
    decode((90, 31, 32, 33), page_size=5, cache="strided", window_left=20, sinks=True, **heads(6, 2)),
    decode((40, 2), q_len=5, q_scale=0.5, k_scale=1.5, v_scale=-1.25, tensor_scales=True, slack=True, **heads(4, 1)),
    decode((40, 2, 300), sm_scale=-0.1, cache="list", page_size=1, **heads(2, 1), **dims(256)),
    decode((0, 0), sinks=True),
    decode((2, 9, 70), q_len=6, window_left=3, dtype="bfloat16", indices="int64", **heads(8, 2)),  # several row blocks
    decode(tuple(range(40)), kv_dtype=E4M3, page_size=16),
    decode((65, 12, 0), kv_dtype=E4M3, page_size=16, sinks=True, **heads(8, 1), **dims(512)),
    decode((40, 2), kv_layout="HND", cache="strided", page_size=32, window_left=20, **heads(4, 1), **dims(512)),
    decode((70, 33), page_size=16, q_len=2, dtype="bfloat16", **heads(4, 2), **dims(32)),
)

# As large as a captured launch gets.
GRAPHED = (
    decode((300,) * 3, kv_dtype=E4M3, dtype="bfloat16", **heads(4, 2)),
    decode((200,) * 2, q_len=3, page_size=5, window_left=50, sinks=True, **heads(2, 1)),
    decode((150,) * 4, kv_dtype="nvfp4", kv_layout="HND", k_scale=0.5, v_scale=2.0, tensor_scales=True, **heads(2, 1)),
)


def is_taken(problem: BatchCase) -> bool:
    """Does XQA take this request, or this batch?"""
    return not batch_case.refusals(problem, "xqa", named("sm_90a"))


SMALL = [*(batch for batch in batch_case.SMALL if batch.kind == "decode" and is_taken(batch)), *CASES]


def random_batches(seed: int, max_len: int, max_batch: int) -> Iterator[BatchCase]:
    """Decode cases without end, what XQA does not take taken away from them."""
    for number in itertools.count():
        drawn = batch_case.random_batch_case(1_000_003 * seed + number, max_len, max_batch)
        if drawn.kind != "decode":
            continue
        head_dim = random.Random(number).choice((64, 128, 256, 512))
        plain = {
            "logits_soft_cap": 0.0,
            "pos_encoding_mode": "NONE",
            "fixed_split_size": None,
            "disable_split_kv": False,
        }
        yield dataclasses.replace(drawn, **dims(head_dim), **plain)
