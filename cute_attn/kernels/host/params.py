"""Values that the parameter blocks of all families share."""

from __future__ import annotations

import math

import torch

LOG2E = math.log2(math.e)


UNBOUNDED = 1 << 30  # no causal or window bound: beyond any kv index, and row + UNBOUNDED fits 32 bits


# Where a launch writes and what only the last writer of `out` applies: addresses of out and lse, strides of a token and
# a head of out in bytes, v_scale, address of its tensor, address of sinks.
Target = tuple[int, int, int, int, float, int, int]


Values = tuple[int | float, ...]


Batch = tuple[int, int, int, int]  # addresses of items, o_partial, lse_partial, kv_indices


def two_addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Of at most two tensors; 0 stands for none."""
    first, *second = (tensor.data_ptr() for tensor in tensors)
    return first, second[0] if second else 0
