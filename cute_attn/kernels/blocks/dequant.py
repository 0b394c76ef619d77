"""Conversion of narrow numbers to 16-bit pairs in registers, each with the instructions that an architecture has."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.runtime import dsl
from cute_attn.runtime.arch import Arch


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


@dataclass(frozen=True)
class Fp8ToBf16(Fp8):
    """Converts fp8 to bf16 with one instruction per pair."""

    def word(self, word: Int32) -> list[Int32]:
        return ptx.fp8x4_to_bf16(self.stored, word)


def scaled(dtype: str, pairs: list[Int32], factor: Float32) -> list[Int32]:
    """Multiplies pairs of 16-bit numbers in fp32, and rounds."""
    return [ptx.pack_16(dtype, *(x * factor for x in ptx.unpack_16(dtype, pair))) for pair in pairs]


def fp8_converter(dtype: str, stored: str, arch: Arch) -> Fp8:
    kind = Fp8ToBf16 if dtype == "bfloat16" and _converts_to_bf16(arch) else Fp8
    return kind(dtype, stored, arch.converts_e4m3)


def e2m1_converter(dtype: str, arch: Arch) -> Callable[[Int32], list[Int32]]:
    """Returns what converts 8 numbers of e2m1, low nibble first, to 4 words of `dtype`: by instructions for it, one per
    pair, where the architecture has them.
    """
    if dtype == "bfloat16":
        native, by_integers = _converts_to_bf16(arch), ptx.e2m1x8_to_bf16
    else:
        native, by_integers = arch.converts_e2m1, ptx.e2m1x8_to_f16
    return partial(ptx.cvt_e2m1x8, dtype) if native else by_integers


def _converts_to_bf16(arch: Arch) -> bool:
    """Whether narrow numbers become bf16 in one instruction: needs PTX ISA 9.2, which the DSL's flavour for CUDA 12
    lacks."""
    return arch.converts_e2m1 and dsl.cuda_major(dsl.version() or "") >= 13
