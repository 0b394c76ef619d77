"""Batches whose keys the transform warps of fa3 prepare: NVFP4 widened, 16-bit keys rotated."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support import batch_case
from tests.support.batch_case import BatchCase, heads, ragged
from tests.support.persistent_emulated import BATCHES, CUDA, FA3, GATHERED

NVFP4: dict[str, Any] = {"kv_dtype": "nvfp4"}
ROPE: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5, "rope_scale": 4.0}


def _of(changes: dict[str, Any]) -> list[BatchCase]:
    """The batches that fa3 takes with these changes."""
    split = ragged((3, 40), (900, 129), fixed_split_size=128, v_scale=0.5, **heads(4, 2))
    made = [dataclasses.replace(batch, **changes) for batch in (*BATCHES, *GATHERED, split)]
    return [batch for batch in made if FA3.takes(batch_case.features(batch, CUDA))]


NVFP4_BATCHES = _of(NVFP4)
ROPE_BATCHES = _of(ROPE)
