"""TMA tensor maps: the 128 bytes that `cuTensorMapEncodeTiled` encodes from an address, sizes and strides."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

from cute_attn.errors import ArgumentError
from cute_attn.runtime.launch import load_driver

BYTES = 128
_ALIGNMENT = 64
_STRIDE_LIMIT = 1 << 40
_DATA_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLE_NONE, SWIZZLE_128B, L2_PROMOTION_256B = 0, 3, 3
_INTERLEAVE_NONE, _FILL_ZEROS = 0, 0


def encode(
    dtype: str, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> bytes:
    """Returns the map of a tensor of `sizes` (contiguous axis first) and `strides` (bytes, of the other axes).

    Boxes are filled with zeros outside the tensor. With `SWIZZLE_128B` their rows have 128 bytes.
    """
    for what, values in (("address", [address]), ("stride", strides)):
        for value in values:
            if value % 16 or value < 0:
                raise ArgumentError(
                    f"TMA needs an address and strides that are multiples of 16 bytes, got {what} {value}"
                )
    if max(strides) >= _STRIDE_LIMIT:
        raise ArgumentError(f"TMA needs strides below 2^40 bytes, got {tuple(strides)}")
    rank = len(sizes)
    storage = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
    aligned = -(-ctypes.addressof(storage) // _ALIGNMENT) * _ALIGNMENT
    status = _encoder()(
        aligned,
        _DATA_TYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        swizzle,
        L2_PROMOTION_256B,
        _FILL_ZEROS,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed ({status}): {dtype} {tuple(sizes)} strides {tuple(strides)}")
    return ctypes.string_at(aligned, BYTES)


@functools.cache
def _encoder() -> Callable[..., int]:
    """Returns the driver's C function: the map object of the Python binding is not aligned."""
    status, address, *_ = load_driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0)
    if status:
        raise RuntimeError(f"the driver has no cuTensorMapEncodeTiled: {status.name}")
    pointer, word = ctypes.c_void_p, ctypes.c_int
    prototype = ctypes.CFUNCTYPE(
        word, pointer, word, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer, word, word, word, word
    )
    return prototype(int(address))
