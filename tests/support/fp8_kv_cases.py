"""The test matrices with 8-bit keys and values under 16-bit q, as far as the Hopper kernel supports them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch

from cute_attn.dispatch import capabilities, select
from cute_attn.problem import Features
from cute_attn.runtime.arch import named
from tests.support import batch_case, case
from tests.support.batch_case import BatchCase
from tests.support.case import Case

CUDA = torch.device("cuda")
KV_DTYPES = ("float8_e4m3fn", "float8_e5m2")


def taken(features: Features) -> bool:
    return not select.reasons_against(capabilities.BY_NAME["fa3"], features, named("sm_90a"))


def singles(problems: Iterable[Case]) -> list[Case]:
    stored = [x for x in problems if x.storage != "packed_qkv" and x.kv_dtype is None]
    dtypes = itertools.cycle(KV_DTYPES)
    made = [dataclasses.replace(x, kv_dtype=dtype) for x, dtype in zip(stored, dtypes, strict=False)]
    return [x for x in made if taken(case.features(x, CUDA))]


def batches(problems: Iterable[BatchCase]) -> list[BatchCase]:
    wide = [x for x in problems if x.kv_dtype is None and x.kind != "decode"]
    dtypes = itertools.cycle(KV_DTYPES)
    made = [dataclasses.replace(x, kv_dtype=dtype) for x, dtype in zip(wide, dtypes, strict=False)]
    return [x for x in made if taken(batch_case.features(x, CUDA))]
