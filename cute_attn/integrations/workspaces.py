"""Workspaces of engines' layers, and of calls whose callers bring none."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from cute_attn.runtime import capture

BYTES = 128 << 20  # enough for every plan without `fixed_split_size`
DECODE_BYTES = 32 << 20  # of decodes without a plan: 8 MiB of counters, which must start as 0, and partial results
MAX_STREAMS = 16  # with a workspace of their own


class Workspaces(NamedTuple):
    """Scratch memory of a device. Steps that overlap in time must not share it."""

    planned: torch.Tensor
    decode: torch.Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> Workspaces:
        """Allocate new ones."""
        return cls(
            torch.empty(BYTES, dtype=torch.uint8, device=device),
            torch.zeros(DECODE_BYTES, dtype=torch.uint8, device=device),
        )


def of_stream(device: torch.device) -> torch.Tensor:
    """Return the memory for partial results of the current stream, whose launches run one after the other."""
    return _zeros(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0, BYTES)


def too_small(device: torch.device) -> torch.Tensor:
    """Return a workspace too small for any launch, which then takes memory of its own stream, or of its graph."""
    return _zeros(device, -1, 16)


@functools.lru_cache(MAX_STREAMS)
def _zeros(device: torch.device, stream: int, size: int) -> torch.Tensor:
    return capture.outside(device, functools.partial(torch.zeros, size, dtype=torch.uint8, device=device))
