"""Conversion of fp8 pairs to 16-bit pairs in registers."""

from dataclasses import dataclass

from cutlass import Int32

from cute_attn.kernels.blocks import ptx


@dataclass(frozen=True)
class Fp8:
    """Converts `stored` fp8 to `dtype`; `native`: the architecture has an instruction for e4m3."""

    dtype: str
    stored: str
    native: bool

    def pairs(self, words: list[Int32], scales: Int32) -> list[Int32]:
        """Converts 16 numbers to 8 words."""
        return [pair for word in words for pair in self.word(word)]

    def word(self, word: Int32) -> list[Int32]:
        """Converts 4 numbers to 2 words, through fp16."""
        halves = ptx.e5m2x4_to_f16(word) if self.stored == "float8_e5m2" else ptx.e4m3x4_to_f16(word, self.native)
        if self.dtype == "float16":
            return halves
        return [ptx.pack_16(self.dtype, *ptx.unpack_16("float16", pair)) for pair in halves]
