"""All micro-kernels, and the descriptors whose bytes are recorded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from tests.emulator.micro import collective, hopper, scalar
from tests.emulator.micro.case import Case, Map

ADDRESS = 0x7F1234560000  # of descriptors that are only encoded
PLAIN = ("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16")


@functools.cache
def cases() -> tuple[Case, ...]:
    return tuple(itertools.chain(scalar.cases(), collective.cases(), hopper.cases()))


def maps() -> Iterator[Map]:
    """Descriptors over every field."""
    for dtype in PLAIN:
        item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        yield Map(dtype, (64, 100), (64 * item,), (16 // item, 7))
    for swizzle, l2 in itertools.product(range(4), range(4)):
        yield Map("bfloat16", (128, 1000, 8), (512, 512000), (16, 100, 1), swizzle, l2=l2)
    for rank in range(1, 6):
        dims, strides = (64, 3, 5, 7, 9)[:rank], (256, 1 << 13, 1 << 21, 1 << 37)[: rank - 1]
        yield Map("float16", dims, strides, (32, 2, 3, 4, 5)[:rank], 2)
    yield Map("float16", (1 << 31, 1 << 20), ((1 << 40) - 16,), (64, 256), 3)
