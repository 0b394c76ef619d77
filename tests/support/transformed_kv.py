"""Batches whose keys the transform warps of fa3 prepare: NVFP4 widened, 16-bit keys rotated."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support import batch_case
from tests.support.batch_case import BatchCase, dims, heads, paged, ragged
from tests.support.matrix import BF16
from tests.support.persistent_emulated import CUDA, FA3

NVFP4: dict[str, Any] = {"kv_dtype": "nvfp4"}
ROPE: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5, "rope_scale": 4.0}

# The first: several kv tiles in boxes of 16 tokens, an empty request, rows past the end.
_BATCHES = (
    paged((70, 0, 9), (150, 20, 260), page_size=16, mask="causal", **BF16, **dims(128), **heads(2, 1)),
    paged((70, 9), (100, 140), page_size=3, mask="packed", sinks=True, o_dtype="float32", seed=39),
    paged((70,), (140,), page_size=7, kv_layout="HND", cache="strided", seed=29, **BF16, **dims(256), **heads(1, 1)),
    paged((70,), (140,), page_size=64, window_left=30, **dims(192, 128)),
    ragged((3, 20), (300, 60), fixed_split_size=128, v_scale=0.5, **heads(2, 1)),
    ragged((70, 9), (100, 140), mask="causal", cache="strided", **dims(80), **heads(1, 1)),
)


def _of(changes: dict[str, Any]) -> list[BatchCase]:
    """The batches that fa3 takes with these changes."""
    made = [dataclasses.replace(batch, **changes) for batch in _BATCHES]
    return [batch for batch in made if FA3.takes(batch_case.features(batch, CUDA))]


NVFP4_BATCHES = _of(NVFP4)
ROPE_BATCHES = _of(ROPE)
