"""Matrix operands in shared memory: from matrix descriptors to the numbers of each row."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.formats import DECODERS
from cute_attn.emulator.memory import SHARED_START, SharedMemory
from cute_attn.emulator.tensormap import swizzled

CHUNK = 16  # bytes that are contiguous in every layout
K_BYTES = 32  # of a row of A or B, whatever the type
ITEM_BYTES = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}


@dataclass(frozen=True)
class Operand:
    """Layout of an operand: byte offsets and strides. `swizzle`: 0 none, 1 of 32, 2 of 64, 3 of 128 bytes. `mn_major`:
    rows, not k, are contiguous."""

    start: int
    leading: int
    stride: int
    swizzle: int
    mn_major: bool


def hopper(descriptor: int, mn_major: bool) -> Operand:
    """Decode a wgmma matrix descriptor."""
    if descriptor >> 49 & 7:
        raise PtxError(f"matrix descriptor {descriptor:#x}: a base offset is not supported")
    return _operand(descriptor, {0: 0, 1: 3, 2: 2, 3: 1}[descriptor >> 62], mn_major)


def blackwell(descriptor: int, mn_major: bool) -> Operand:
    """Decode a tcgen05 matrix descriptor."""
    fixed, absolute, code = descriptor >> 46 & 7, descriptor >> 52 & 1, descriptor >> 61
    modes = {0: 0, 2: 3, 4: 2, 6: 1}
    refusals = {
        "bits 46-48 must be 1": fixed != 1,
        "a base offset is not supported": bool(descriptor >> 49 & 7),
        "absolute leading addresses do not exist on sm_100": bool(absolute),
        f"swizzle mode {code} is not supported": code not in modes,
    }
    for reason, refused in refusals.items():
        if refused:
            raise PtxError(f"matrix descriptor {descriptor:#x}: {reason}")
    return _operand(descriptor, modes[code], mn_major)


def _operand(descriptor: int, swizzle: int, mn_major: bool) -> Operand:
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    return Operand(start, leading, stride, swizzle, mn_major)


@functools.lru_cache(8192)
def offsets(operand: Operand, first: int, rows: int, item_bytes: int) -> Array:
    """Offsets of the 16-byte chunks of rows first .. first + rows: [rows, chunks along k], or for an MN-major operand
    [k, chunks along the rows]."""
    atom = CHUNK << operand.swizzle  # bytes of a line; one chunk without a swizzle
    if operand.mn_major:
        k = np.arange(K_BYTES // item_bytes)[:, None]
        at = (np.arange(rows * item_bytes // CHUNK) * CHUNK + first * item_bytes)[None, :]
        # Without a swizzle the two strides swap roles.
        along, across = (operand.leading, operand.stride) if operand.swizzle else (operand.stride, operand.leading)
        found = at % atom + at // atom * along + k % 8 * atom + k // 8 * across
    else:
        r = (np.arange(rows) + first)[:, None]
        at = (np.arange(K_BYTES // CHUNK) * CHUNK)[None, :]
        found = r // 8 * operand.stride + r % 8 * atom + at % atom + at // atom * operand.leading
    where = operand.start + found
    result: Array = swizzled(where, operand.swizzle).astype(np.int64)
    if int(result.min()) < SHARED_START:
        raise PtxError(f"a matrix operand starts at shared {operand.start:#x}, below the CTA's memory")
    return result


def load(memory: SharedMemory, operand: Operand, first: int, rows: int, kind: str, op: Op, what: str) -> Array:
    """Load rows first .. first + rows of an operand for `op`, as float32: [rows, k]."""
    where = offsets(operand, first, rows, ITEM_BYTES[kind])
    flat = where.ravel()
    memory.check(flat, CHUNK, f"{what} operand")
    chunks = memory.load(flat, CHUNK, op, what)
    items = np.ascontiguousarray(chunks).view(f"u{ITEM_BYTES[kind]}").reshape(len(where), -1)
    raw = np.ascontiguousarray(items.T if operand.mn_major else items)
    return DECODERS[kind](raw).reshape(raw.shape)
