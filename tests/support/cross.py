"""Random problems that both fa2 and a persistent kernel solve, many of them with the same few kernels."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

from cute_attn.dispatch import capabilities, select
from cute_attn.runtime.arch import named
from tests.support.batch_case import BatchCase, features, random_batch_case
from tests.support.matrix import random_case
from tests.support.persistent_emulated import CUDA, Target

A_KERNEL = 16  # problems in a row that differ in lengths, strides and numbers only
DISTANCE = 1_000_003  # between the seeds of kernels


def backends(target: Target) -> tuple[str, str]:
    return "fa2", target.kernels


def solved_by_both(target: Target, problem: BatchCase) -> bool:
    wanted = features(problem, CUDA)
    fa2 = select.reasons_against(capabilities.BY_NAME["fa2"], wanted, named(target.arch))
    return not fa2 and target.takes(wanted)


def batch(target: Target, seed: int, max_len: int = 700) -> BatchCase:
    drawn = (random_batch_case(DISTANCE * (seed // A_KERNEL) + n) for n in itertools.count())
    kernel = next(b for b in drawn if b.rows and solved_by_both(target, b))
    other = next(
        b
        for b in (random_batch_case(DISTANCE * seed + n + 1, max_len, 8) for n in itertools.count())
        if b.kind == kernel.kind and b.rows
    )
    size = other.page_size if (other.page_size < 32) == (kernel.page_size < 32) else kernel.page_size
    same = ("qo_lens", "kv_lens", "num_qo_heads", "num_kv_heads", "kv_layout", "slack", "lse_base", "return_lse")
    changes: dict[str, Any] = {name: getattr(other, name) for name in same}
    changes["cache"] = other.cache if kernel.head_dim_qk == kernel.head_dim_vo else "strided"
    if kernel.window_left >= 0:
        changes["window_left"] = random.Random(seed).choice((0, 1, 31, 200, 1000, 2**31 - 1))
    return dataclasses.replace(kernel, **changes, page_size=size, seed=seed)


def single(target: Target, seed: int, max_len: int = 1500) -> BatchCase:
    drawn = (random_case(DISTANCE * (seed // A_KERNEL) + n) for n in itertools.count())
    kernel = next(c for c in drawn if c.kind == "single_prefill" and solved_by_both(target, c))
    others = (random_case(DISTANCE * seed + n + 1, max_len) for n in itertools.count())
    other = next(c for c in others if c.kind == "single_prefill" and c.storage != "expanded")
    same = ("qo_lens", "kv_lens", "num_qo_heads", "num_kv_heads", "kv_layout", "storage", "return_lse")
    changes: dict[str, Any] = {name: getattr(other, name) for name in same}
    if kernel.window_left >= 0:
        changes["window_left"] = random.Random(seed).choice((0, 1, 31, 200, 1000, 2**31 - 1))
    return dataclasses.replace(kernel, **changes, seed=seed)
