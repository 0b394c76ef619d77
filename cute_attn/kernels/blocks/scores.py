"""Score modifications of x = q.k, applied in the order of `Fa2Spec.scores`, before the mask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import PackedRows


@dataclass(frozen=True)
class Scale:
    """Multiplies by sm_scale. Not needed when softmax scales, for a positive scale and no other modification."""

    scale: Float32

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        return [x * self.scale for x in s]


@dataclass(frozen=True)
class RowScales:
    """Multiplies by one scale per row slot, kept in registers or computed for every tile."""

    scales: Callable[[], list[Float32]]

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        scales = self.scales()
        return [x * scales[i % 4 // 2] for i, x in enumerate(s)]


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

    tile: Any  # WarpTile and Lanes, or WarpgroupTile and WarpgroupLanes
    rows: PackedRows
    lanes: Any
    num_qo_heads: Int32

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        out = list(s)
        memory = self.tile.memory
        first_col = kv_start + self.lanes.first_col(memory)
        for slot in range(self.tile.row_slots):
            row = self.lanes.row(memory, slot)
            slope = alibi_slope(self.rows.head(row), self.num_qo_heads)
            start = slope * Float32(first_col - self.rows.token(row))
            for n in range(self.tile.n_blocks):
                for j in (0, 1):
                    i = 4 * ((slot // 2) * self.tile.n_blocks + n) + 2 * (slot % 2) + j
                    out[i] = out[i] + ptx.fma(slope, Float32(n * 8 + j), start)
        return out


@cute.jit
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

    steps: Sequence[Scale | RowScales | SoftCap | Alibi]

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        for step in self.steps:
            s = step.apply(s, kv_start)
        return s
