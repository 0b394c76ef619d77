"""The test matrices with 8-bit keys and values under 16-bit q, as far as persistent kernels support them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from cute_attn.problem import Features
from tests.support import batch_case, case, persistent_emulated
from tests.support.batch_case import BatchCase
from tests.support.case import Case
from tests.support.matrix import E4M3, prefill
from tests.support.persistent_emulated import CUDA

KV_DTYPES = ("float8_e4m3fn", "float8_e5m2")
LLAMA = case.features(prefill(70, 70, (1, 1), 128, **E4M3), CUDA)
TARGETS = tuple(target for target in persistent_emulated.TARGETS if target.takes(LLAMA))


def of_8_bits(problems: Iterable[Any], features: Callable[..., Features]) -> list[Any]:
    dtypes = itertools.cycle(KV_DTYPES)
    made = [dataclasses.replace(x, kv_dtype=dtype) for x, dtype in zip(problems, dtypes, strict=False)]
    return [x for x in made if all(target.takes(features(x, CUDA)) for target in TARGETS)]


def singles(problems: Iterable[Case]) -> list[Case]:
    return of_8_bits((x for x in problems if x.storage != "packed_qkv" and x.kv_dtype is None), case.features)


def batches(problems: Iterable[BatchCase]) -> list[BatchCase]:
    return of_8_bits((x for x in problems if x.kv_dtype is None and x.kind != "decode"), batch_case.features)
