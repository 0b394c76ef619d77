"""Epilogues, from accumulators to global memory: normalisation, log-sum-exp, merge of warps that share rows, stores."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import RegisterLayout
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import device_scale
from cute_attn.kernels.blocks.softmax import add
from cute_attn.kernels.formats import FP8_DTYPES

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

    @classmethod
    def of(cls, p: Any) -> "FinalEpilogue":
        """Returns the epilogue of a launch's parameters, whose scale of v memory may hold."""
        return cls(p.sinks, p.v_scale * device_scale(p.v_scale_ptr), p.lse_scale)

    def scaled(self, factor: Float32) -> "FinalEpilogue":
        return replace(self, v_scale=self.v_scale * factor)

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
class ScaledPartialEpilogue(PartialEpilogue):
    """Row epilogue of partial outputs that applies the head's v scale, which the combine kernel does not know."""

    v_scale: Float32

    def row(self, maximum: Float32, total: Float32, head: Int32) -> tuple[Float32, Float32]:
        factor, lse = super().row(maximum, total, head)
        return factor * self.v_scale, lse


STORES = {count: ptx.Store("global", Int32, count) for count in (1, 2, 4)}  # by words, of any type


def store_numbers(dtype: str, address: Int64, offset: int, values: list[Float32]) -> None:
    """Stores adjacent numbers of a row in `dtype`, 16 bytes or less at once."""
    words = words_of(dtype, values)
    for i in range(0, len(words), 4):
        STORES[min(4, len(words))](address, offset + 4 * i, words[i : i + 4])


def words_of(dtype: str, values: list[Float32]) -> list[Any]:
    if dtype == "float32":
        return values
    if dtype in FP8_DTYPES:
        return [ptx.pack_8(dtype, values[i : i + 4]) for i in range(0, len(values), 4)]
    return ptx.pack_pairs(dtype, values)


class OutputRows:
    """Rows of 16-bit or fp32 elements."""

    dtype: str

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def store(self, address: Int64, offset: int, values: list[Float32]) -> None:
        """Stores eight adjacent elements of a row."""
        store_numbers(self.dtype, address, offset, values)

    def store_32_bytes(self, address: Int64, offset: int, values: list[Float32], aligned: Boolean) -> None:
        """Stores adjacent elements of a row that have 32 bytes (sm_100 and later)."""
        ptx.st_global_v8(address, offset, words_of(self.dtype, values), aligned)


@dataclass(frozen=True)
class Target(OutputRows):
    """Output rows [token, head] of 16-bit or fp32 elements, and their lse (or 0)."""

    dtype: str
    o: Int64
    token_stride: Int64
    head_stride: Int64
    lse: Int64
    num_heads: Int32

    def row(self, rows: PackedRows, row: Int32) -> Int64:
        return rows.address(self.o, row, self.token_stride, self.head_stride)

    @cute.jit
    def store_lse(self, rows: PackedRows, row: Int32, value: Float32) -> None:
        if self.lse != Int64(0):
            ptx.st_global_f32(rows.lse_address(self.lse, row, self.num_heads), 0, value)

    @property
    def aligned_to_32(self) -> Boolean:
        """Whether every row starts at a multiple of 32 bytes."""
        return ((self.o | self.token_stride | self.head_stride) & Int64(31)) == Int64(0)


@dataclass(frozen=True)
class Partials(OutputRows):
    """fp32 rows of a tile in a work item's slot of the workspace; `first` is row 0 of this kv head in the slot."""

    dtype = "float32"
    o: Int64
    lse: Int64
    first: Int64
    head_dim: int

    def row(self, rows: PackedRows, row: Int32) -> Int64:
        return self.o + (self.first + Int64(row)) * Int64(self.head_dim * 4)

    def store_lse(self, rows: PackedRows, row: Int32, value: Float32) -> None:
        ptx.st_global_f32(self.lse + (self.first + Int64(row)) * Int64(4), 0, value)

    @property
    def aligned_to_32(self) -> Boolean:
        """Whether every row starts at a multiple of 32 bytes: rows are as long as eight elements, or several times."""
        return (self.o & Int64(31)) == Int64(0)
