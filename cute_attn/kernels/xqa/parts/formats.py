"""Storage formats of K and V: conversion of ldmatrix registers to operands of 16-bit MMA instructions.

Both products take K or V as their A operand, 16 rows x 16 contraction indices:

    S^T [kv tokens, rows] = K   Q^T        rows of A: tokens        contraction: head dim
    O^T [head dim,  rows] = V^T P^T        rows of A: head dim      contraction: tokens

so that the few query rows are the 8 columns of an instruction. ldmatrix moves 16-bit units. With smaller elements, a
lane holds adjacent head dims where the instruction expects distant ones. The order of a contraction is free, so Q is
loaded in the same permuted order (`queries`); rows of O^T come out permuted and are stored to their true dimension
(`output_dim`).

Conversions are exact up to a power of two, the format's `dequant_factor`, which is folded into the scales.

`k_scales` and `v_scales` read the block scales of 16 tokens, if the format has any; `k_operands` and `v_operands`
convert the result of one ldmatrix.x4, 32 bytes of a row, to operands. `q_words` loads `q_bytes` bytes of a row of q in
the order of K's operands, `p_tokens` brings P^T of 16 tokens into the order of V's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.softmax import SLACK
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.e2m1 import HardwareE2m1, SpreadBits
from cute_attn.kernels.xqa.smem import XqaMemory

E4M3_SHIFTED = 256.0

Operand = list[Int32]
ScalesOf = Callable[[int], list[Operand]]  # of operand m, 16 tokens
LoadQ = Callable[[Int32, int, int], Operand]  # words from a lane's byte offset and a constant one on


@dataclass(frozen=True)
class OwnP:
    """What formats have in common that use P^T as it is."""

    slack = SLACK

    def p_tokens(self, b: Operand) -> Operand:
        return b

    def p_operands(self, p: list[Operand], tile: int, scales: list[Operand]) -> list[Operand]:
        return p


@dataclass(frozen=True)
class Unscaled(OwnP):
    """What formats without block scales have in common."""

    def k_scales(self, slot: Int32, m: int) -> list[Operand]:
        return []

    def v_scales(self, slot: Int32) -> ScalesOf:
        return lambda m: []


@dataclass(frozen=True)
class Kv16Bit(Unscaled):
    """fp16 and bf16, used without conversion."""

    operands_per_load = 1
    transposed_pairs = True  # V: the four 8x8 matrices are at (token, dim) = (0, 0), (0, 8), (8, 0), (8, 8)
    dequant_factor = 1.0
    q_bytes = 32

    def q_words(self, load: LoadQ, t: Int32) -> Operand:
        return load(t * 4, 0, 1) + load(t * 4, 16, 1)

    def k_operands(self, loaded: Operand, pair: int, scales: list[Operand]) -> list[Operand]:
        return [loaded]

    v_operands = k_operands

    def output_dim(self, tile: int, g: Int32) -> tuple[Int32, int]:
        """Head dim of row g of output tile `tile`, and the distance from it to that of row g + 8."""
        return g + 16 * tile, 8


@dataclass(frozen=True)
class Kv8Bit(Unscaled):
    """e4m3 and e5m2: four elements per register, two operands per ldmatrix."""

    dtype: str
    native: bool  # the GPU has an instruction that converts e4m3

    operands_per_load = 2
    transposed_pairs = False  # V: (token, chunk) = (0, 0), (8, 0), (0, 1), (8, 1), as for K
    q_bytes = 32

    @property
    def dequant_factor(self) -> float:
        return E4M3_SHIFTED if self.dtype == "float8_e4m3fn" and not self.native else 1.0

    def q_words(self, load: LoadQ, t: Int32) -> Operand:
        return load(t * 8, 0, 2)

    def k_operands(self, loaded: Operand, pair: int, scales: list[Operand]) -> list[Operand]:
        """Use a lane's four bytes, dims 4t .. 4t + 3 of a token, as contraction indices 2t, 2t + 1, 2t + 8, 2t + 9."""
        halves = [self.halves(x) for x in loaded]
        return [[halves[i][0], halves[i + 1][0], halves[i][1], halves[i + 1][1]] for i in (0, 2)]

    def v_operands(self, loaded: Operand, pair: int, scales: list[Operand]) -> list[Operand]:
        """Regroup a lane's four bytes, dims 2g, 2g + 1 of token 2t and then of token 2t + 1, into token pairs."""
        halves = [self.halves(ptx.permute(x, x, 0x3120)) for x in loaded]
        return [[halves[i][0], halves[i][1], halves[i + 1][0], halves[i + 1][1]] for i in (0, 2)]

    def output_dim(self, tile: int, g: Int32) -> tuple[Int32, int]:
        return g * 2 + 16 * tile, 1

    def halves(self, x: Int32) -> list[Int32]:
        """Bytes (0, 1) and (2, 3) as f16x2."""
        if self.dtype == "float8_e5m2":
            return ptx.e5m2x4_to_f16(x)
        return e4m3_halves(x, self.native)


@dataclass(frozen=True)
class Kv4Bit:
    """NVFP4: eight e2m1 elements per register, four operands per ldmatrix, one e4m3 scale per 16 elements.

    The product of an element and its block scale is exact: six significant bits, never below the smallest subnormal
    fp16 number, 2^-24, even where elements come divided by 2^14.

    A chunk of 32 dims has two scale blocks; g decides to which of them a lane's rows of O^T belong. By default V is
    scaled, four registers per operand. Where four columns hold all query rows (`paired`), columns 4 to 7 repeat them
    with the scales of the second block: P is scaled instead, two registers per operand, and V is used unscaled. Half
    of O^T is then meaningless and is not stored (`merge`).
    """

    memory: XqaMemory
    e2m1: SpreadBits | HardwareE2m1
    native: bool  # as for `Kv8Bit`
    paired: bool

    operands_per_load = 4
    transposed_pairs = False
    q_bytes = 64

    @property
    def dequant_factor(self) -> float:
        return self.e2m1.factor

    def q_words(self, load: LoadQ, t: Int32) -> Operand:
        return self.e2m1.q_words(load(t * 16, 0, 4))

    def k_scales(self, slot: Int32, m: int) -> list[Operand]:
        """scales[pair]: f16x2 of the scales of two chunks, for token g and for token g + 8. A lane's eight dims,
        8t .. 8t + 7 of a chunk of 32, share one of the chunk's two scales."""
        lane = cute.arch.thread_idx()[0] & 31
        at = slot + (lane >> 2) * self.memory.scale_bytes + self.memory.k_scales
        selector = ptx.select(lane >> 1 & 1 == 0, Int32(0x6420), Int32(0x7531))
        halves = []
        for token in (16 * m, 16 * m + 8):
            words = self._words(at, token)
            fours = zip(words[::2], words[1::2] or words, strict=True)  # one word holds all scales of head dim 64
            halves.append(flatten([self._fp16(isa.permute_by(low, high, selector)) for low, high in fours]))
        return [list(both) for both in zip(*halves, strict=True)]

    def v_scales(self, slot: Int32) -> ScalesOf:
        """scales[chunk]: f16x2 for the first pair of tokens and for the second. A lane's dims are 4g .. 4g + 3 of a
        chunk of 32."""
        return lambda m: self._v_scales(slot, m)

    def _v_scales(self, slot: Int32, m: int) -> list[Operand]:
        lane = cute.arch.thread_idx()[0] & 31
        at = slot + (lane & 3) * (2 * self.memory.scale_bytes) + self.memory.v_scales
        # Interleaves the even or the odd scales of both tokens.
        selector = ptx.select(lane >> 4 == 0, Int32(0x6240), Int32(0x7351))
        halves = []
        for tokens in self.e2m1.token_pairs:
            first, second = (self._words(at, 16 * m + token) for token in tokens)
            pairs = [self._fp16(isa.permute_by(a, b, selector)) for a, b in zip(first, second, strict=True)]
            halves.append(flatten(pairs))
        return [list(both) for both in zip(*halves, strict=True)]

    def _words(self, at: Int32, token: int) -> list[Int32]:
        """Words that hold the block scales of one token."""
        size, base = self.memory.scale_bytes, token * self.memory.scale_bytes
        if size == 4:
            return [ptx.ld_shared_b32(at, base)]
        return flatten([ptx.ld_shared_v2(at, base + offset) for offset in range(0, size, 8)])

    def _fp16(self, x: Int32) -> list[Int32]:
        if self.native:
            return e4m3_halves(x, True)
        return [isa.mul_f16x2(half, Int32(0x5C005C00)) for half in e4m3_halves(x, False)]  # times E4M3_SHIFTED

    def k_operands(self, loaded: Operand, pair: int, scales: list[Operand]) -> list[Operand]:
        """Use a lane's pairs as contraction indices 2t, 2t + 1 (the first and third) or 2t + 8, 2t + 9."""
        operands = []
        for i in (0, 1):
            low, high = scales[pair]
            a, b = self._scaled(loaded[2 * i], low, i), self._scaled(loaded[2 * i + 1], high, i)
            operands += [[a[j], b[j], a[j + 1], b[j + 1]] for j in (0, 2)]
        return operands

    def v_operands(self, loaded: Operand, pair: int, scales: list[Operand]) -> list[Operand]:
        """Use pairs of dims 4g and 4g + 1 as rows g and g + 8 of an operand, those of 4g + 2 and 4g + 3 of the next."""
        operands = []
        for i in (0, 1):
            x, y = self.e2m1.v_pairs(loaded[2 * i], loaded[2 * i + 1])
            a, b = (x, y) if self.paired else self._times((x, y), scales[2 * pair + i])
            operands += [[a[j], a[j + 1], b[j], b[j + 1]] for j in (0, 2)]
        return operands

    def _scaled(self, x: Int32, scales: Int32, half: int) -> list[Int32]:
        """Pairs of a word of K times one of the two scales."""
        return [isa.scale_f16x2(pair, scales, half) for pair in self.e2m1.k_pairs(x)]

    def _times(self, words: tuple[Operand, ...], scales: Operand) -> tuple[Operand, ...]:
        return tuple([isa.mul_f16x2(x, scale) for x in pairs] for pairs, scale in zip(words, scales, strict=True))

    def p_tokens(self, b: Operand) -> Operand:
        return self.e2m1.p_tokens(b)

    def p_operands(self, p: list[Operand], tile: int, scales: list[Operand]) -> list[Operand]:
        """P^T as the B operand of output tile `tile`: scaled where V is not."""
        if not self.paired:
            return p
        return [[isa.mul_f16x2(x, scale) for x, scale in zip(b, scales[tile // 2], strict=True)] for b in p]

    @property
    def slack(self) -> float:
        """Headroom of P in log2 units: P times the largest scale, 448, must fit fp16."""
        return SLACK - 1 if self.paired else SLACK

    def output_dim(self, tile: int, g: Int32) -> tuple[Int32, int]:
        return g * 4 + (tile // 2 * 32 + tile % 2 * 2), 1


def flatten(lists: list[list[Int32]]) -> list[Int32]:
    return [x for part in lists for x in part]


def e4m3_halves(x: Int32, native: bool) -> list[Int32]:
    """Bytes (0, 1) and (2, 3) as f16x2; divided by E4M3_SHIFTED where the GPU cannot convert e4m3."""
    if native:
        return [isa.e4m3_pair(x, 0), isa.e4m3_pair(x, 1)]
    # Moves the sign to bit 15 and the other bits to 13..7, where fp16's bias makes them 2^-8 times the number.
    return [_shifted(ptx.permute(x, Int32(0), selector)) for selector in (0x1404, 0x3424)]


def _shifted(x: Int32) -> Int32:
    moved = isa.shift_right(x, 1)
    return (x & Int32(-0x7FFF8000)) | (moved & Int32(0x3F803F80))
