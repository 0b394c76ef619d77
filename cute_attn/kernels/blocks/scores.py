"""Score modifications of x = q.k, applied in the order of `Fa2Spec.scores`, before the mask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.register_layout import FragmentPosition, RegisterLayout
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import device_scale, head_scale

MIN_SCALE = 1e-30  # of scores: 0 would turn hidden ones into NaN


def score_scale(p: Any) -> Float32:
    """Returns the scale of scores of a launch, whose factors device memory may hold."""
    return p.scale * device_scale(p.scale0) * device_scale(p.scale1)


def row_scale(p: Any, work: Any, head: Int32) -> Float32:
    """Loads and multiplies the scales of a query head's scores, for every query tile anew: registers are scarce."""
    return score_scale(p) * head_scale(p.scale_k, work.kv_head(p)) * head_scale(p.scale_q, head)


@dataclass(frozen=True)
class RowScales:
    """Multiplies by one scale per row slot, kept in registers or computed for every tile. Not needed when softmax
    scales, for positive scales and no other modification.
    """

    layout: RegisterLayout
    scales: Callable[[], list[Float32]]

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        return self.layout.scale_rows(s, self.scales())


@dataclass(frozen=True)
class SoftCap:
    """Computes cap * tanh(x / cap)."""

    cap: Float32

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        inverse = ptx.reciprocal(self.cap)
        return [self.cap * ptx.tanh(x * inverse) for x in s]


@dataclass(frozen=True)
class Alibi:
    """Adds slope[head] * (kv_idx - qo_idx), with qo_idx the local row index (FlashInfer's convention)."""

    layout: RegisterLayout
    rows: PackedRows
    lanes: FragmentPosition
    num_qo_heads: Int32

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        out = list(s)
        first_col = kv_start + self.lanes.first_col()
        for slot in self.layout.slots:
            row = self.lanes.row(slot)
            slope = alibi_slope(self.rows.head(row), self.num_qo_heads)
            start = slope * Float32(first_col - self.rows.token(row))
            for register, column in self.layout.places(slot):
                out[register] = out[register] + ptx.fma(slope, Float32(column), start)
        return out


@dataclass(frozen=True)
class RowAlibi:
    """`Alibi` of a thread that owns a row. The slope is computed once: its division is a subroutine."""

    slope: Float32
    token: Int32

    @classmethod
    def of(cls, rows: PackedRows, row: Int32, num_qo_heads: Int32) -> "RowAlibi":
        slope = ptx.asm("mov.b32 $0, $1;", [Float32], [alibi_slope(rows.head(row), num_qo_heads)])
        return cls(slope, rows.token(row))

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        start = self.slope * Float32(kv_start - self.token)
        return [x + ptx.fma(self.slope, Float32(column), start) for column, x in enumerate(s)]


def alibi_slope(head: Int32, num_heads: Int32) -> Float32:
    """Returns 2^(-8 (h + 1) / n) for the first n = 2^floor(log2 heads) heads, then 2^(-4 (2 (h - n) + 1) / n).

    Press et al. 2022.
    """
    n = Int32(1) << (Int32(31) - ptx.asm("clz.b32 $0, $1;", [Int32], [num_heads], pure=True))
    numerator = ptx.select(head < n, (head + 1) * 8, (2 * (head - n) + 1) * 4)
    return ptx.exp2(Float32(0.0) - Float32(numerator) / Float32(n))


@dataclass(frozen=True)
class Scores:
    """The chain of modifications of one spec."""

    steps: Sequence[RowScales | SoftCap | Alibi]

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        for step in self.steps:
            s = step.apply(s, kv_start)
        return s
