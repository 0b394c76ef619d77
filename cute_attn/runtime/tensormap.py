"""TMA tensor maps: the 128 bytes that `cuTensorMapEncodeTiled` encodes from an address, sizes and strides."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from cute_attn.errors import ArgumentError
from cute_attn.runtime.launch import load_driver

BYTES = 128
_ALIGNMENT = 64
_STRIDE_LIMIT, _STRIDE_UNIT = 1 << 40, 16
_DATA_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLE_NONE, SWIZZLE_128B, L2_PROMOTION_256B = 0, 3, 3
_INTERLEAVE_NONE, _FILL_ZEROS = 0, 0


class Encoder:
    """Encodes the maps of tensors that differ in address and in the length of one axis. Threads may share it."""

    def __init__(
        self, dtype: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, axis: int
    ) -> None:
        """`sizes`: elements per axis, the contiguous one first. `strides`: bytes between elements of the other axes.
        `axis`: the one whose length moves, not the first; its size here does not count. Boxes are filled with zeros
        outside the tensor. With `SWIZZLE_128B` their rows have 128 bytes.
        """
        if min(strides) < 0 or max(strides) >= _STRIDE_LIMIT:
            raise ArgumentError(f"TMA needs strides from 0 to below 2^40 bytes, got {tuple(strides)}")
        rank = len(sizes)
        self._axis, self._stride = axis, strides[axis - 1]
        self._sizes = (ctypes.c_uint64 * rank)(*[max(size, 1) for size in sizes])
        # Strides of axes of one element are arbitrary.
        used = [stride if size > 1 else _STRIDE_UNIT for stride, size in zip(strides, sizes[1:], strict=True)]
        used[axis - 1] = _STRIDE_UNIT
        self._strides = (ctypes.c_uint64 * (rank - 1))(*[_checked("stride", stride) for stride in used])
        self._storage = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
        self._map = -(-ctypes.addressof(self._storage) // _ALIGNMENT) * _ALIGNMENT
        boxes, steps = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
        self._before = self._map, _DATA_TYPES[dtype], rank
        self._after = (
            *(self._sizes, self._strides, boxes, steps),
            *(_INTERLEAVE_NONE, swizzle, L2_PROMOTION_256B, _FILL_ZEROS),
        )
        self._encode, self._lock = _encoder(), threading.Lock()

    def __call__(self, length: int, address: int) -> bytes:
        """Returns the map of a tensor. One without elements is never read: its address may be 0."""
        axis, stride = self._axis, self._stride if length > 1 else _STRIDE_UNIT
        if (address | stride) % _STRIDE_UNIT:
            _checked("address", address), _checked("stride", stride)
        with self._lock:
            self._sizes[axis], self._strides[axis - 1] = length or 1, stride
            status = self._encode(*self._before, address or _STRIDE_UNIT, *self._after)
            if not status:
                return ctypes.string_at(self._map, BYTES)
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed ({status}): sizes {tuple(self._sizes)} strides {tuple(self._strides)}"
        )


def _checked(what: str, value: int) -> int:
    """Returns an address or a stride that TMA takes."""
    if value % _STRIDE_UNIT:
        raise ArgumentError(f"TMA needs an address and strides that are multiples of 16 bytes, got {what} {value}")
    return value


def _encoder() -> Callable[..., int]:
    """Returns the driver's C function: the map object of the Python binding is not aligned."""
    status, address, *_ = load_driver().cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, 0)
    if status:
        raise RuntimeError(f"the driver has no cuTensorMapEncodeTiled: {status.name}")
    pointer, word = ctypes.c_void_p, ctypes.c_int
    prototype = ctypes.PYFUNCTYPE(  # without giving the interpreter lock up: the function takes less time than that
        word, pointer, word, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer, word, word, word, word
    )
    return prototype(int(address))
