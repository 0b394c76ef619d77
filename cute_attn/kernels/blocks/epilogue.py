"""Epilogues, from accumulators to global memory: normalisation, log-sum-exp, merge of warps that share rows, stores."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import RegisterLayout
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.softmax import add

LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of finite fp32 numbers


class RowStats(NamedTuple):
    """Per row slot, the maximum in log2 units and the sum of exp2(score - maximum) over all visible keys."""

    maximum: list[Float32]
    total: list[Float32]

    @classmethod
    def of(cls, layout: RegisterLayout, shift: list[Float32], total: list[Float32]) -> "RowStats":
        """Reduces softmax state, where maxima are negated and sums are per thread, to whole rows."""
        return cls([Float32(0.0) - x for x in shift], [layout.reduce(add, x) for x in total])


def add_sink(maximum: Float32, total: Float32, sink: Float32) -> tuple[Float32, Float32, Float32]:
    """Adds the term exp(sink) to the denominator; returns (new maximum, new total, factor for the previous sums)."""
    term = sink * Float32(ptx.LOG2E)
    new = ptx.fmax(maximum, term)
    # The term of a huge sink is +inf: with a finite anchor it takes all the weight, where inf - inf would be NaN.
    anchor = ptx.select(new == ptx.NEG_INF, Float32(0.0), ptx.fmin(new, Float32(LARGEST)))
    factor = ptx.exp2(maximum - anchor)
    return new, ptx.fma(total, factor, ptx.exp2(term - anchor)), factor


def normaliser(total: Float32) -> Float32:
    """Returns 1 / total, or 0 for rows without visible keys, so that their outputs are zeros."""
    return ptx.select(total == Float32(0.0), Float32(0.0), ptx.reciprocal(total))


def log_sum_exp(maximum: Float32, total: Float32) -> Float32:
    """Log-sum-exp in base 2; -inf for rows without visible keys (log2 of 0 is -inf, and so is the maximum)."""
    return maximum + ptx.log2(total)


@dataclass(frozen=True)
class FinalEpilogue:
    """Row epilogue of final outputs: applies the sink (address of fp32 per head, or 0), the v scale and the unit of
    lse.
    """

    sinks: Int64
    v_scale: Float32
    lse_scale: Float32

    @cute.jit
    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        """Returns (factor for the row's accumulator, lse)."""
        factor = self.v_scale
        if self.sinks != Int64(0):
            sink = ptx.ld_global_f32(self.sinks + Int64(head) * Int64(4))
            maximum, total, kept = add_sink(maximum, total, sink)
            factor = factor * kept
        return factor * normaliser(total), log_sum_exp(maximum, total) * self.lse_scale


class PartialEpilogue:
    """Row epilogue of a split's partial output: normalises by the split's own sum and applies nothing else."""

    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        return normaliser(total), log_sum_exp(maximum, total)


@dataclass(frozen=True)
class Target:
    """Output rows [token, head] of 16-bit or fp32 elements, and their lse (or 0)."""

    dtype: str
    o: Int64
    token_stride: Int64
    head_stride: Int64
    lse: Int64
    num_heads: Int32

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def row(self, rows: PackedRows, row: Int32) -> Int64:
        return rows.address(self.o, row, self.token_stride, self.head_stride)

    @cute.jit
    def store_lse(self, rows: PackedRows, row: Int32, value: Float32) -> None:
        if self.lse != Int64(0):
            index = Int64(rows.start + rows.token(row)) * Int64(self.num_heads) + Int64(rows.head(row))
            ptx.st_global_f32(self.lse + index * Int64(4), 0, value)

    def store_8(self, address: Int64, offset: int, values: list[Float32]) -> None:
        """Stores eight adjacent elements of a row."""
        if self.dtype == "float32":
            store_8_f32(address, offset, values)
        else:
            ptx.st_global_v4(address, offset, ptx.pack_pairs(self.dtype, values))

    @property
    def aligned_to_32(self) -> Boolean:
        """Whether every row starts at a multiple of 32 bytes."""
        return ((self.o | self.token_stride | self.head_stride) & Int64(31)) == Int64(0)

    def store_32_bytes(self, address: Int64, offset: int, values: list[Float32], aligned: Boolean) -> None:
        """Stores adjacent elements of a row that have 32 bytes (sm_100 and later)."""
        words = values if self.dtype == "float32" else ptx.pack_pairs(self.dtype, values)
        ptx.st_global_v8(address, offset, words, aligned)


@dataclass(frozen=True)
class Partials:
    """fp32 rows of a tile in a work item's slot of the workspace; `first` is row 0 of this kv head in the slot."""

    dtype: ClassVar[str] = "float32"
    element_bytes: ClassVar[int] = 4
    o: Int64
    lse: Int64
    first: Int64
    head_dim: int

    def row(self, rows: PackedRows, row: Int32) -> Int64:
        return self.o + (self.first + Int64(row)) * Int64(self.head_dim * 4)

    def store_lse(self, rows: PackedRows, row: Int32, value: Float32) -> None:
        ptx.st_global_f32(self.lse + (self.first + Int64(row)) * Int64(4), 0, value)

    def store_8(self, address: Int64, offset: int, values: list[Float32]) -> None:
        store_8_f32(address, offset, values)

    @property
    def aligned_to_32(self) -> Boolean:
        """Whether every row starts at a multiple of 32 bytes: rows are as long as eight elements, or several times."""
        return (self.o & Int64(31)) == Int64(0)

    def store_32_bytes(self, address: Int64, offset: int, values: list[Float32], aligned: Boolean) -> None:
        ptx.st_global_v8(address, offset, values, aligned)


def store_8_f32(address: Int64, offset: int, values: list[Float32]) -> None:
    ptx.st_global_v4_f32(address, offset, values[:4])
    ptx.st_global_v4_f32(address, offset + 16, values[4:])
