"""TMA tensor maps: the 128 bytes of a tiled descriptor, read and made.

The layout is not documented. Where fields lie was found by comparing descriptors of different tensors. Types have other
numbers than in CUtensorMapDataType.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import LaunchFault, MemoryFault

BYTES = 128
DTYPES = {  # in the order of their codes: bytes of an item
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float32_ftz": 4,
    "float64": 8,
    "bfloat16": 2,
}
SWIZZLE_SPAN = (0, 32, 64, 128)  # bytes, by code
_SWIZZLE_PERIOD = (16, 256, 512, 1024)  # bytes after which a pattern repeats
UNIT = 16  # bytes in which TMA addresses global memory

_FIELDS = {  # first bit and number of bits, in the 1024 bits of a map
    "address": (0, 64),
    "rank": (68, 3),
    "type": (71, 4),
    "swizzle": (77, 2),
    "l2": (81, 2),
    **{f"stride {i}": (96 + 32 * i, 32) for i in range(4)},
    **{f"high stride {i}": (224 + 4 * i, 4) for i in range(4)},
    **{f"dim {i}": (256 + 32 * i, 32) for i in range(5)},
    **{f"box {i}": (440 + 8 * i, 8) for i in range(5)},
    "box bytes": (512, 64),
    "swizzle period": (576, 64),
}


@dataclass(frozen=True)
class TensorMap:
    """Decoded tensor map. `dims` and `box` count elements, innermost first; `strides` count bytes, without the
    innermost."""

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2: int = 0

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype]

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
            "flushing subnormals is not supported": self.dtype != "float32_ftz",
            "sizes must be 1 to 2^32": all(1 <= d <= 1 << 32 for d in self.dims),
        }
        for rule, holds in rules.items():
            if not holds:
                raise LaunchFault(f"tensor map {self}: {rule}")

    def encode(self) -> bytes:
        """The bytes that cuTensorMapEncodeTiled makes."""
        units = [stride >> 4 for stride in self.strides]
        fields = {"address": self.address, "rank": self.rank - 1, "type": list(DTYPES).index(self.dtype)}
        fields |= {"swizzle": self.swizzle, "l2": self.l2}
        fields |= {f"stride {i}": unit & 0xFFFFFFFF for i, unit in enumerate(units)}
        fields |= {f"high stride {i}": unit >> 32 for i, unit in enumerate(units)}
        fields |= {f"dim {i}": size - 1 for i, size in enumerate(self.dims)}
        fields |= {f"box {i}": size - 1 for i, size in enumerate(self.box)}
        fields |= {"box bytes": self.box_bytes, "swizzle period": _SWIZZLE_PERIOD[self.swizzle]}
        return sum(value << _FIELDS[name][0] for name, value in fields.items()).to_bytes(BYTES, "little")


def decode(raw: bytes) -> TensorMap:
    bits = int.from_bytes(raw, "little")
    f = {name: bits >> at & (1 << count) - 1 for name, (at, count) in _FIELDS.items()}
    rank, code = f["rank"] + 1, f["type"]
    if rank > 5 or code >= len(DTYPES):
        raise MemoryFault(f"not a tensor map: rank {rank}, type {code}")
    found = TensorMap(
        f["address"],
        list(DTYPES)[code],
        tuple(f[f"dim {i}"] + 1 for i in range(rank)),
        tuple((f[f"stride {i}"] | f[f"high stride {i}"] << 32) << 4 for i in range(rank - 1)),
        tuple(f[f"box {i}"] + 1 for i in range(rank)),
        f["swizzle"],
        f["l2"],
    )
    if found.encode() != raw:
        raise MemoryFault(f"a tensor map with fields that the emulator does not know: {raw.hex()}")
    return found


@dataclass(frozen=True)
class Chunks:
    """Pieces of a box, of equal size: the position of each in shared memory (bytes from the start,
    before swizzling) and in global memory, and whether it is inside the tensor."""

    nbytes: int
    shared: Array
    addresses: Array
    inside: Array
    swizzle: int = 0

    def offsets(self, start: int) -> Array:
        """Places in shared memory from `start` on."""
        return swizzled(start + self.shared, self.swizzle)


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
