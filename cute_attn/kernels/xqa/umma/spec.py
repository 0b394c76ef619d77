"""Compile key of the decode kernel on tcgen05."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.spec import DecodeSpec

HEAD_DIMS = (64, 128, 256)
ROWS = (16, 32, 64)  # packed query rows of a CTA: the N of all products
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
P_TERMS = 3  # in e5m2, of 3 significant bits each
PIECE_DIM = 128  # head dims of a slot of K or V: the largest M of a product


@dataclass(frozen=True)
class XqaUmmaSpec(DecodeSpec):
    """Compile key of the decode kernel on tcgen05. `kv_dtype` is "" or of 8 bits."""

    kernel: ClassVar[str] = "xqa_umma"
    cols: ClassVar[int] = 128  # tokens of a tile: the M of S^T = K Q^T
    segment_overhead: ClassVar[int] = 2  # not measured
    rows: int = 16
    stages: int = 4  # slots of K and V: 128 tokens of up to 128 head dims each

    def rules(self) -> dict[str, bool]:
        return {
            f"head_dim must be one of {HEAD_DIMS}": self.head_dim in HEAD_DIMS,
            f"rows must be one of {ROWS}": self.rows in ROWS,
            "k and v must have 16 or 8 bits": self.kv_bits in (16, 8),
            "stages must be 2 or more": self.stages >= 2,
        }

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of all operands."""
        return self.kv_bits // 8

    @property
    def kv_operand(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def q_operand(self) -> str:
        return E4M3 if self.kv_bits == 8 else self.dtype

    @property
    def p_operand(self) -> str:
        return E5M2 if self.kv_bits == 8 else self.dtype

    @property
    def q_terms(self) -> int:
        """Operands that add up to q: e4m3 has 4 significant bits, bf16 8, fp16 11."""
        if self.kv_bits == 16:
            return 1
        return {"bfloat16": 2, "float16": 3}[self.dtype]

    @property
    def p_terms(self) -> int:
        """Operands that add up to P."""
        return 1 if self.kv_bits == 16 else P_TERMS

    @property
    def line(self) -> int:
        """Bytes of a line of K, V and Q in shared memory, which is swizzled."""
        return min(self.piece_dim * self.item_bytes, LINE)

    @property
    def piece_dim(self) -> int:
        """Head dims of a slot."""
        return min(self.head_dim, PIECE_DIM)

    @property
    def pieces(self) -> int:
        """Slots of a tile of K, and of V."""
        return self.head_dim // self.piece_dim
