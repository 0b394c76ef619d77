"""e2m1 words as pairs of fp16: with integer instructions, or with those that Blackwell has for it.

Both give every pair to an operand as it comes; what differs is which elements a pair holds. So each form also says in
which order q and P^T must be: the orders of both contractions are free.
"""

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts import instructions as isa

Words = list[Int32]
MMA_DTYPE = "float16"
LOW_NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True)
class SpreadBits:
    """Moves bits with 10 integer instructions per word: elements i and i + 4 become a pair, divided by 2^14."""

    factor: ClassVar[float] = 16384.0
    token_pairs: ClassVar = ((0, 1), (8, 9))  # of V's operands, relative to 2t of 16 tokens

    def q_words(self, words: Words) -> Words:
        """Eight dims of a row of q in the order of `k_pairs`."""
        a, b, c, d = words
        return [ptx.permute(*two, half) for two in ((a, c), (b, d)) for half in (0x5410, 0x7632)]

    def k_pairs(self, word: Int32) -> Words:
        return isa.e2m1_spread(word)

    def v_pairs(self, x: Int32, y: Int32) -> tuple[Words, Words]:
        """Dims 4g .. 4g + 3 of the first token pair, and of the second. Words hold four dims of two tokens: `x` of 2t
        and 2t + 1, `y` of 2t + 8 and 2t + 9."""
        return isa.e2m1_spread(x), isa.e2m1_spread(y)

    def p_tokens(self, b: Words) -> Words:
        """P^T of tokens (2t, 2t + 1) and (2t + 8, 2t + 9) in the order of `token_pairs`."""
        return b


@dataclass(frozen=True)
class HardwareE2m1:
    """Converts neighbours with one instruction per pair (`Arch.converts_e2m1`).

    A pair of K is two neighbouring dims, as q has them. A pair of V must be two tokens of one dim: two instructions per
    word first join the halves of bytes of two words, 8 tokens apart.
    """

    factor: ClassVar[float] = 1.0
    token_pairs: ClassVar = ((0, 8), (1, 9))

    def q_words(self, words: Words) -> Words:
        return words

    def k_pairs(self, word: Int32) -> Words:
        return ptx.cvt_e2m1x8(MMA_DTYPE, word)

    def v_pairs(self, x: Int32, y: Int32) -> tuple[Words, Words]:
        even = ptx.cvt_e2m1x8(MMA_DTYPE, isa.select_bits(LOW_NIBBLES, x, isa.shift_left(y, 4)))
        odd = ptx.cvt_e2m1x8(MMA_DTYPE, isa.select_bits(LOW_NIBBLES, isa.shift_right(x, 4), y))
        return [even[0], odd[0], even[1], odd[1]], [even[2], odd[2], even[3], odd[3]]

    def p_tokens(self, b: Words) -> Words:
        first, second = b
        return [ptx.permute(first, second, half) for half in (0x5410, 0x7632)]
