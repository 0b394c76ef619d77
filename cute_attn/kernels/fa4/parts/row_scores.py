"""Score modifications of threads that own a row."""

from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scores import alibi_slope


@dataclass(frozen=True)
class RowAlibi:
    """Adds slope * (kv_idx - qo_idx), as `Alibi` does. The slope is computed once: its division is a subroutine."""

    slope: Float32
    token: Int32

    @classmethod
    def of(cls, rows: PackedRows, row: Int32, num_qo_heads: Int32) -> "RowAlibi":
        slope = ptx.asm("mov.b32 $0, $1;", [Float32], [alibi_slope(rows.head(row), num_qo_heads)])
        return cls(slope, rows.token(row))

    def apply(self, s: list[Float32], kv_start: Int32) -> list[Float32]:
        start = self.slope * Float32(kv_start - self.token)
        return [x + ptx.fma(self.slope, Float32(column), start) for column, x in enumerate(s)]
