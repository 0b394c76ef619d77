"""Operands of the products: P and Q, of 8 bits as sums.

K and V of 8 bits are operands as they are stored, which asks for 8 bits on the other side, too: a number is the sum of
*terms* of few significant bits, which are columns of a product of their own, so that K and V are read once. A term is
what the terms before it leave.
"""

from collections.abc import Iterator, Sequence

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.blocks.softmax import SLACK
from cute_attn.kernels.xqa.umma.spec import E4M3, E5M2, XqaUmmaSpec

UPPER_BYTES = -0x00FF0100  # of the halves of a word: 0xFF00FF00
UPPER_OF_TWO = 0x7531  # selects the upper bytes of the halves of two words


def e4m3_terms(values: Sequence[Float32], terms: int) -> list[Int32]:
    """Returns terms of four numbers below 448, a word each. Two terms are 8 significant bits, three 12, and no bits
    below 2^-10.
    """
    rest, words = ptx.pack_pairs("float16", values), []
    for term in range(terms):
        words.append(ptx.pack_8_of_f16(E4M3, rest[0], rest[1]))
        if term < terms - 1:
            rounded = ptx.e4m3x4_to_f16(words[-1], native=True)
            rest = [ptx.subtract_f16(x, y) for x, y in zip(rest, rounded, strict=True)]
    return words


class Probabilities:
    """P in the dtype of q, of 16 bits. `offset`: log2 of P right after the anchor moved to it; `limit`: log2 of the
    largest P.
    """

    offset, limit = 0.0, SLACK

    def __init__(self, spec: XqaUmmaSpec) -> None:
        self.spec = spec

    def chunks(self, p: Sequence[Float32]) -> Iterator[tuple[int, list[Int32]]]:
        """Yields the 16-byte chunks of a token's lines with their numbers."""
        for i in range(0, len(p), 8):
            yield i // 8, ptx.pack_pairs(self.spec.p_operand, p[i : i + 8])


class E5m2Probabilities(Probabilities):
    """P as three terms in e5m2, the upper byte of fp16: two are cut off, the last one is rounded. The error is below
    2^-9 of a probability, or 2^-17: anchors are 2^7, so that probabilities keep their bits as in fp16.
    """

    offset, limit = 7.0, 7.0 + SLACK

    def chunks(self, p: Sequence[Float32]) -> Iterator[tuple[int, list[Int32]]]:
        for i in range(0, len(p), CHUNK):
            terms = list(zip(*(self.terms(p[j : j + 4]) for j in range(i, i + CHUNK, 4)), strict=True))
            for term, words in enumerate(terms):
                yield (term * self.spec.rows + i) // CHUNK, list(words)

    def terms(self, p: Sequence[Float32]) -> list[Int32]:
        """Returns the terms of four probabilities, a word each."""
        rest, words = ptx.pack_pairs("float16", p), []
        for _ in range(self.spec.p_terms - 1):
            words.append(ptx.permute(rest[0], rest[1], UPPER_OF_TWO))
            rest = [ptx.subtract_f16(x, x & Int32(UPPER_BYTES)) for x in rest]
        return [*words, ptx.pack_8_of_f16(E5M2, rest[0], rest[1])]


def probabilities(spec: XqaUmmaSpec) -> Probabilities:
    return (Probabilities if spec.item_bytes == 2 else E5m2Probabilities)(spec)
