"""The test matrices with 8-bit keys and values under 16-bit q, as far as persistent kernels support them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from tests.support import persistent_emulated
from tests.support.batch_case import BatchCase, features
from tests.support.matrix import E4M3, prefill
from tests.support.persistent_emulated import CUDA

KV_DTYPES = ("float8_e4m3fn", "float8_e5m2")
LLAMA = features(prefill(70, 70, (1, 1), 128, **E4M3), CUDA)
TARGETS = tuple(target for target in persistent_emulated.TARGETS if target.takes(LLAMA))


def of_8_bits(problems: Iterable[BatchCase]) -> list[BatchCase]:
    wide = [x for x in problems if x.kv_dtype is None and x.storage != "packed_qkv" and x.kind != "decode"]
    made = [dataclasses.replace(x, kv_dtype=dtype) for x, dtype in zip(wide, itertools.cycle(KV_DTYPES), strict=False)]
    return [x for x in made if all(target.takes(features(x, CUDA)) for target in TARGETS)]
