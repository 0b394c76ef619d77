"""TMA tensor maps: the 128 bytes of a tiled descriptor, read and made.

The layout is not documented. Where fields lie was found by comparing descriptors of different tensors. Types have other
numbers than in CUtensorMapDataType.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import LaunchFault, MemoryFault

BYTES = 128
DTYPES = (
    "uint8",
    "uint16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float32_ftz",
    "float64",
    "bfloat16",
    "tfloat32",
    "tfloat32_ftz",
)
_ITEM_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)
CONVERTING = ("float32_ftz", "tfloat32", "tfloat32_ftz")  # loads change values
_CODES = (*range(11), 7 | 1 << 9, 8 | 1 << 9)  # of data types: TF32 is float32 with a bit of its own
SWIZZLE_SPAN = (0, 32, 64, 128)  # bytes, by code
_SWIZZLE_PERIOD = (16, 256, 512, 1024)  # bytes after which a pattern repeats
UNIT = 16  # bytes in which TMA addresses global memory

_RANK, _DTYPE, _INTERLEAVE, _SWIZZLE, _NAN_FILL, _L2 = 4, 7, 11, 13, 15, 17  # bits of word 1


@dataclass(frozen=True)
class TensorMap:
    """Decoded tensor map. `dims`, `box` and `steps` (traversal strides) count elements, innermost first; `strides`
    count bytes, without the innermost."""

    address: int
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    l2: int = 0
    nan_fill: bool = False

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.item_bytes

    @property
    def line_bytes(self) -> int:
        """Bytes of the innermost dimension, the bound of loads."""
        return self.dims[0] * self.item_bytes

    @property
    def stored_line_bytes(self) -> int:
        """Bytes of the innermost dimension as stores bound it: they write the last 16-byte unit whole, over the
        bytes that follow the tensor's line in memory."""
        return -(-self.line_bytes // UNIT) * UNIT

    def __post_init__(self) -> None:
        row = self.box[0] * self.item_bytes
        rules = {
            "the address must be a multiple of 16": self.address % 16 == 0,
            "strides must be multiples of 16 below 2^40": all(s % 16 == 0 and s < 1 << 40 for s in self.strides),
            "box sides must be 1 to 256": all(1 <= b <= 256 for b in self.box),
            "the innermost side of the box must be a multiple of 16 bytes": row % 16 == 0,
            "the innermost side of the box must not exceed the swizzle span": self.swizzle == 0
            or row <= SWIZZLE_SPAN[self.swizzle],
            "traversal strides must be 1": all(s == 1 for s in self.steps),
            "only floats are filled with NaN": not self.nan_fill or "float" in DTYPES[self.dtype],
            "interleaved layouts are not supported": self.interleave == 0,
            "sizes must be 1 to 2^32": all(1 <= d <= 1 << 32 for d in self.dims),
        }
        for rule, holds in rules.items():
            if not holds:
                raise LaunchFault(f"tensor map {self}: {rule}")

    def encode(self) -> bytes:
        dims = [d - 1 for d in self.dims] + [0] * (5 - self.rank)
        strides = [s >> 4 for s in self.strides] + [0] * (4 - len(self.strides))
        box = [b - 1 for b in self.box] + [0] * (5 - self.rank)
        flags = (
            (self.rank - 1) << _RANK
            | _CODES[self.dtype] << _DTYPE
            | self.interleave << _INTERLEAVE
            | self.swizzle << _SWIZZLE
            | int(self.nan_fill) << _NAN_FILL
            | self.l2 << _L2
        )
        low = [s & 0xFFFFFFFF for s in strides]
        high = sum((s >> 32) << (32 + 4 * i) for i, s in enumerate(strides))
        words = [
            self.address,
            flags | low[0] << 32,
            low[1] | low[2] << 32,
            low[3] | high,
            dims[0] | dims[1] << 32,
            dims[2] | dims[3] << 32,
            dims[4] | box[0] << 56,
            box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24,
            self.box_bytes,
            _SWIZZLE_PERIOD[self.swizzle],
        ]
        return struct.pack("<10Q", *words).ljust(BYTES, b"\0")


def decode(raw: bytes) -> TensorMap:
    w = struct.unpack("<8Q", raw[:64])
    flags = w[1] & 0xFFFFFFFF
    rank = ((flags >> _RANK) & 7) + 1
    code = (flags >> _DTYPE) & (1 << 9 | 15)
    if rank > 5 or code not in _CODES:
        raise MemoryFault(f"not a tensor map: rank {rank}, type {code:#x}")
    dims = [(w[4 + i // 2] >> (32 * (i % 2)) & 0xFFFFFFFF) + 1 for i in range(5)]
    low = (w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF)
    strides = [(low[i] | (w[3] >> (32 + 4 * i) & 15) << 32) << 4 for i in range(4)]
    box = [(w[6] >> 56) + 1, *((w[7] >> (8 * i) & 255) + 1 for i in range(4))]
    found = TensorMap(
        w[0],
        _CODES.index(code),
        tuple(dims[:rank]),
        tuple(strides[: rank - 1]),
        tuple(box[:rank]),
        (1,) * rank,
        (flags >> _SWIZZLE) & 3,
        (flags >> _INTERLEAVE) & 3,
        (flags >> _L2) & 3,
        bool(flags >> _NAN_FILL & 1),
    )
    if found.encode() != raw:
        raise MemoryFault(f"a tensor map with fields that the emulator does not know: {raw.hex()}")
    return found


def encode_tiled(
    dtype: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: int = 0,
    l2: int = 0,
    nan_fill: bool = False,
) -> bytes:
    """Encode a map as cuTensorMapEncodeTiled does: `strides` in bytes, of all dimensions but the innermost."""
    ones = (1,) * len(dims)
    code = DTYPES.index(dtype)
    return TensorMap(
        address, code, tuple(dims), tuple(strides), tuple(box), ones, swizzle, l2=l2, nan_fill=nan_fill
    ).encode()


@dataclass(frozen=True)
class Chunks:
    """Pieces of a box or of a run of bytes, of equal size: the position of each in shared memory (bytes from the start,
    before swizzling) and in global memory, and whether it is inside the tensor."""

    nbytes: int
    shared: Array
    addresses: Array
    inside: Array
    swizzle: int = 0
    nan_fill: bool = False

    def offsets(self, start: int) -> Array:
        """Places in shared memory from `start` on."""
        return swizzled(start + self.shared, self.swizzle)


def run(address: int, nbytes: int) -> Chunks:
    """Cut a run of bytes into pieces of 16."""
    steps = np.arange(0, nbytes, UNIT)
    return Chunks(UNIT, steps, address + steps, np.ones(len(steps), np.bool_))


def chunks(tensor: TensorMap, place: Sequence[int], line_bytes: int) -> Chunks:
    """Cut the box at `place` into pieces of 16 bytes, or into elements if `line_bytes`, the bound of the innermost
    dimension, cuts a piece."""
    row_bytes = tensor.box[0] * tensor.item_bytes
    start = place[0] * tensor.item_bytes
    end = line_bytes - start
    nbytes = UNIT if end % UNIT == 0 or end >= row_bytes else tensor.item_bytes
    inner = np.arange(row_bytes // nbytes) * nbytes
    inside = (inner + start >= 0) & (inner + start < line_bytes)
    address, valid = _lines(tensor, place)
    return Chunks(
        nbytes,
        (np.arange(len(address))[:, None] * row_bytes + inner).ravel(),
        (address[:, None] + inner + start).ravel(),
        (valid[:, None] & inside).ravel(),
        tensor.swizzle,
        tensor.nan_fill,
    )


def _lines(tensor: TensorMap, place: Sequence[int]) -> tuple[Array, Array]:
    """Address of each line of a box, at innermost coordinate 0, and whether it is inside the tensor."""
    rows = int(np.prod(tensor.box[1:], dtype=np.int64))
    address = np.full(rows, tensor.address, np.int64)
    valid = np.ones(rows, np.bool_)
    index = np.arange(rows)
    for axis in range(1, tensor.rank):
        position = index % tensor.box[axis] + place[axis]
        index = index // tensor.box[axis]
        valid &= (position >= 0) & (position < tensor.dims[axis])
        address += position * tensor.strides[axis - 1]
    return address, valid


def swizzled(offsets: Array, swizzle: int) -> Array:
    """Apply a swizzle mode to shared offsets: the index of a 16-byte unit is XORed with that of its line."""
    mask = (0, 1, 3, 7)[swizzle]
    return offsets ^ (((offsets >> 7) & mask) << 4)
