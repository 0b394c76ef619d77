"""Matrix operands in shared memory: from a descriptor's numbers to the bytes of each row."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.memory import SHARED_START
from cute_attn.emulator.tensormap import swizzled

CHUNK = 16  # bytes that lie together in every layout


@dataclass(frozen=True)
class Operand:
    """Byte offsets and strides. `swizzle`: 0 none, 1 of 32, 2 of 64, 3 of 128 bytes. `mn_major`: the rows' index runs
    fastest in memory, not k."""

    start: int
    leading: int
    stride: int
    swizzle: int
    mn_major: bool


def hopper(descriptor: int, mn_major: bool) -> Operand:
    """A wgmma matrix descriptor."""
    if descriptor >> 49 & 7:
        raise PtxError(f"matrix descriptor {descriptor:#x}: a base offset is not supported")
    swizzle = {0: 0, 1: 3, 2: 2, 3: 1}[descriptor >> 62]
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return Operand(start, leading, stride, swizzle, mn_major)


@functools.lru_cache(8192)
def offsets(operand: Operand, first: int, rows: int, k_bytes: int, item_bytes: int) -> Array:
    """Offsets of the 16-byte chunks of rows first .. first + rows: [rows, chunks along k], or for an MN-major operand
    [k, chunks along the rows]."""
    atom = CHUNK << operand.swizzle  # bytes of a line; one chunk without a swizzle
    if operand.mn_major:
        k = np.arange(k_bytes // item_bytes)[:, None]
        at = (np.arange(rows * item_bytes // CHUNK) * CHUNK + first * item_bytes)[None, :]
        # Without a swizzle the two strides change their places.
        along, across = (operand.leading, operand.stride) if operand.swizzle else (operand.stride, operand.leading)
        found = at % atom + at // atom * along + k % 8 * atom + k // 8 * across
    else:
        r = (np.arange(rows) + first)[:, None]
        at = (np.arange(k_bytes // CHUNK) * CHUNK)[None, :]
        found = r // 8 * operand.stride + r % 8 * atom + at % atom + at // atom * operand.leading
    result: Array = swizzled(operand.start + found, operand.swizzle).astype(np.int64)
    if int(result.min()) < SHARED_START:
        raise PtxError(f"a matrix operand starts at shared {operand.start:#x}, below the CTA's memory")
    return result


def matrix(chunks: Array, operand: Operand, item_bytes: int) -> Array:
    """Chunks as read (16-byte words in the shape of `offsets`) to raw items [rows, k]."""
    shape = chunks.shape
    items = np.ascontiguousarray(chunks).view(f"u{item_bytes}").reshape(shape[0], -1)
    return items.T if operand.mn_major else items
