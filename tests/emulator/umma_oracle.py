"""Layouts of tcgen05.mma's matrices and its descriptors, read a second time independently, as CuTe layouts.

Descriptors: the bit fields of `SmemDescriptor` and `InstrDescriptor` in CUTLASS (cute/arch/mma_sm100_desc.hpp). The
emulator follows the tables of PTX ISA 9.7.16.4: two sources.
Shared memory: the canonical layouts of PTX ISA 9.7.16.3.3 and `Swizzle` of CUTLASS (cute/swizzle.hpp).
Tensor memory: the atoms of `tmem_frg` in CUTLASS (cute/atom/mma_traits_sm100_frag.hpp). The PTX ISA shows these in
figures only, so the emulator's formulas go back to the same text: this tells slips, not misreadings.
What the corpus runs of it is confirmed there: M = 128 in one CTA, M = 256 in two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_attn.emulator.dtypes import Array
from tests.emulator.tcgen05_kernel import BASE

CODES = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1}
SWIZZLE_CODE = {"none": 0, "128": 2, "64": 4, "32": 6}
LINE = {"none": 1, "32": 2, "64": 4, "128": 8}  # units of 16 bytes


def layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> Array:
    """Offsets of a CuTe layout, the first mode running fastest."""
    found = np.zeros(1, np.int64)
    for size, step in zip(shape, stride, strict=True):
        found = (found[None, :] + (np.arange(size) * step)[:, None]).reshape(-1)
    return found


def swizzle(offsets: Array, mode: str) -> Array:
    """Swizzle<B, M, S>: B bits from bit M + S on are added to those from bit M on."""
    b, m, s = {"none": (0, 4, 3), "32": (1, 4, 3), "64": (2, 4, 3), "128": (3, 4, 3)}[mode]
    picked = offsets & (((1 << b) - 1) << (m + s))
    return offsets ^ (picked >> s)


@dataclass(frozen=True)
class Placed:
    """An operand of `rows` by 32 bytes, K-slice number `slice` of what an atom holds."""

    mode: str
    mn_major: bool
    unit: int  # bytes of an item
    rows: int
    start: int
    slice: int = 0

    @property
    def strides(self) -> tuple[int, int]:
        """(leading, stride) in bytes. Tiles are apart by a little more than they need, but whole patterns."""
        line = LINE[self.mode] * 16
        if not self.mn_major:
            return (16 * 8 * (-(-self.rows // 8) + 1), 128) if self.mode == "none" else (16, 8 * line * 2)
        groups = 32 // self.unit // 8
        if self.mode == "none":
            return 128, 128 * (groups + 1)
        pattern = 1024
        return pattern * groups, pattern

    def offsets(self) -> Array:
        """Byte offset of item (row, k): [rows, 32 / unit]."""
        t, w = 16 // self.unit, LINE[self.mode]
        leading, stride = (x // self.unit for x in self.strides)
        if not self.mn_major:
            rows, k = (8, -(-self.rows // 8)), (t, 2)
            row_stride, k_stride = ((t, stride), (1, leading)) if self.mode == "none" else ((w * t, stride), (1, t))
        else:
            tall = t * w
            rows, k = (t, w, -(-self.rows // tall)), (8, 32 // self.unit // 8)
            if self.mode == "none":
                row_stride, k_stride = (1, t, stride), (t, leading)
            else:
                row_stride, k_stride = (1, t, leading), (w * t, stride)
        found = layout(rows, row_stride)[: self.rows, None] + layout(k, k_stride)[None, :]
        return swizzle(BASE + self.start + 32 * self.slice + found * self.unit, self.mode) - BASE

    def descriptor(self) -> int:
        leading, stride = self.strides
        start = (BASE + self.start + 32 * self.slice) >> 4
        return start | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[self.mode] << 61

    def put(self, image: Array, raw: Array) -> None:
        """`raw`: bytes of the items [rows, items, unit]."""
        at = self.offsets()[..., None] + np.arange(self.unit)
        image[at] = raw


def instruction(m: int, n: int, a: str, b: str, *, a_mn: bool = False, b_mn: bool = False) -> int:
    return 1 << 4 | CODES[a] << 7 | CODES[b] << 10 | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24


# --- tensor memory ----------------------------------------------------------------------------------------------------


def lanes_of(m: int, group: int) -> Array:
    """Lanes of the rows of A and D of one CTA."""
    return layout((16, 4), (1, 32)) if m // group == 64 else np.arange(128)
