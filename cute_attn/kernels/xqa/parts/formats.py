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
from typing import ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.softmax import SLACK
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.layouts import BlockLayout, BlockReads, MatrixReads, TileLayout
from cute_attn.kernels.xqa.parts.softmax import ColumnSoftmax, PackedColumnSoftmax
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.runtime.arch import Arch

E4M3_SHIFTED = 256.0

Operand = list[Int32]
ScalesOf = Callable[[int], list[Operand]]  # of operand m, 16 tokens
LoadQ = Callable[[Int32, int, int], Operand]  # words from a lane's byte offset and a constant one on


@dataclass(frozen=True)
class Plain:
    """What formats have in common that use P^T as it is, and have no block scales unless they say so."""

    slack = SLACK

    def k_scales(self, slot: Int32, m: int) -> list[Operand]:
        return []

    def v_scales(self, slot: Int32) -> ScalesOf:
        return lambda m: []

    def p_tokens(self, b: Operand) -> Operand:
        return b

    def p_operands(self, p: list[Operand], tile: int, scales: list[Operand]) -> list[Operand]:
        return p


@dataclass(frozen=True)
class Kv16Bit(Plain):
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
class Kv8Bit(Plain):
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


# --- e2m1 words as pairs of fp16 --------------------------------------------------------------------------------------

# With integer instructions, or with those that Blackwell has for it. Both give every pair to an operand as it comes;
# what differs is which elements a pair holds. So each form also says in which order q and P^T must be: the orders of
# both contractions are free.


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
        even = ptx.cvt_e2m1x8(MMA_DTYPE, isa.select_bits(LOW_NIBBLES, x, isa.shift_left(y, Int32(4))))
        odd = ptx.cvt_e2m1x8(MMA_DTYPE, isa.select_bits(LOW_NIBBLES, isa.shift_right(x, Int32(4)), y))
        return [even[0], odd[0], even[1], odd[1]], [even[2], odd[2], even[3], odd[3]]

    def p_tokens(self, b: Words) -> Words:
        first, second = b
        return [ptx.permute(first, second, half) for half in (0x5410, 0x7632)]


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


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
        words = loaded[:2], loaded[2:]
        return [x for i in (0, 1) for x in scaled_operands(self.e2m1, words[i], scales[pair], i)]

    def v_operands(self, loaded: Operand, pair: int, scales: list[Operand]) -> list[Operand]:
        """Use pairs of dims 4g and 4g + 1 as rows g and g + 8 of an operand, those of 4g + 2 and 4g + 3 of the next."""
        operands = []
        for i in (0, 1):
            x, y = self.e2m1.v_pairs(loaded[2 * i], loaded[2 * i + 1])
            a, b = (x, y) if self.paired else self._times((x, y), scales[2 * pair + i])
            operands += [[a[j], a[j + 1], b[j], b[j + 1]] for j in (0, 2)]
        return operands

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


def scaled_operands(e2m1: SpreadBits | HardwareE2m1, words: Words, scales: Words, half: int) -> list[Operand]:
    """Operands of a word of token g and one of token g + 8, times one half of their scales."""
    a, b = (
        [isa.scale_f16x2(pair, scale, half) for pair in e2m1.k_pairs(word)]
        for word, scale in zip(words, scales, strict=True)
    )
    return [[a[j], b[j], a[j + 1], b[j + 1]] for j in (0, 2)]


def flatten(lists: list[list[Int32]]) -> list[Int32]:
    return [x for part in lists for x in part]


def e4m3_halves(x: Int32, native: bool) -> list[Int32]:
    """Bytes (0, 1) and (2, 3) as f16x2; divided by E4M3_SHIFTED where the GPU cannot convert e4m3."""
    if native:
        return [isa.e4m3_pair(x, 0), isa.e4m3_pair(x, 1)]
    # Moves the sign to bit 15 and the other bits to 13..7, where fp16's bias makes them 2^-8 times the number.
    return [_shifted(ptx.permute(x, Int32(0), selector)) for selector in (0x1404, 0x3424)]


def _shifted(x: Int32) -> Int32:
    moved = isa.shift_right(x, Int32(1))
    return (x & Int32(-0x7FFF8000)) | (moved & Int32(0x3F803F80))


BLOCKS = 8  # of V that the lanes of a warp hold at once, one for each g
MATRIX = 256  # bytes of the matrix whose bytes `ldmatrix` transposes


@dataclass(frozen=True)
class Kv4BitBlocks(Plain):
    """`Kv4Bit` where a lane holds whole scale blocks, for GPUs that convert e2m1 and transpose bytes (sm_100 and
    later): for `BlockReads`, 32 elements of K per lane, token and read, two scale blocks; 16 of V, one.

    The scales of K are then bytes side by side in shared memory, one load per token. Those of V must come in pairs of
    tokens: `ldmatrix` transposes bytes, which gives lane g column g of 16 rows of 16 bytes, four rows a register.
    """

    memory: XqaMemory
    layout: BlockLayout
    e2m1: HardwareE2m1

    operands_per_load = 4  # of 32 bytes of a row
    dequant_factor = 1.0

    @property
    def q_bytes(self) -> int:
        return 128 * self.memory.loads

    def q_words(self, load: LoadQ, t: Int32) -> Operand:
        """Lane t's quarter of a row, in its order."""
        quarter = self.q_bytes // 4
        return [word for at in range(0, quarter, 16) for word in load(t * quarter, at, 4)]

    def k_scales(self, slot: Int32, m: int) -> list[Operand]:
        """scales[group]: f16x2 of the two blocks of a read, for the token of row g and for that of row g + 8."""
        lane, size = cute.arch.thread_idx()[0] & 31, self.memory.scale_bytes
        at = slot + self.layout.lane_token(lane >> 2) * size + (lane & 3) * (size // 4) + self.memory.k_scales
        load = ptx.ld_shared_u16 if size == 8 else ptx.ld_shared_b32
        both = [e4m3_halves(load(at, self.layout.token(m, half) * size), True) for half in (0, 1)]
        return [[pairs[group] for pairs in both] for group in range(size // 8)]

    def v_scales(self, slot: Int32) -> ScalesOf:
        """scales[group]: f16x2 of the first two of a lane's four tokens, and of the others."""
        lane, size = cute.arch.thread_idx()[0] & 31, self.memory.scale_bytes
        token = self.layout.p_lane_token(lane & 3, lane >> 2 & 3)
        at = slot + (token * size + (lane >> 4) * MATRIX) + self.memory.v_scales
        count = self.memory.spec.cols * size // MATRIX
        words = flatten([isa.ldmatrix_bytes(at, i * MATRIX, min(2, count - i)) for i in range(0, count, 2)])
        groups = size // BLOCKS
        return lambda m: [e4m3_halves(word, True) for word in words[m * groups : (m + 1) * groups]]

    def k_operands(self, loaded: Operand, group: int, scales: list[Operand]) -> list[Operand]:
        """Use a lane's pairs as contraction indices 2t, 2t + 1 (the first and third) or 2t + 8, 2t + 9."""
        return [x for i in range(4) for x in scaled_operands(self.e2m1, loaded[i::4], scales[group], i // 2)]

    def v_operands(self, loaded: Operand, group: int, scales: list[Operand]) -> list[Operand]:
        """Use neighbouring dims as rows g and g + 8 of an operand."""
        operands = []
        for i in (0, 1):
            a, b = (self._scaled_pairs(loaded[j + i], loaded[j + i + 2], scales[group][j // 4]) for j in (0, 4))
            operands += [[a[d], a[d + 1], b[d], b[d + 1]] for d in range(0, 8, 2)]
        return operands

    def _scaled_pairs(self, x: Int32, y: Int32, scales: Int32) -> Operand:
        """Eight dims of two tokens, a pair each, times the tokens' scales."""
        return [isa.mul_f16x2(pair, scales) for pairs in self.e2m1.v_pairs(x, y) for pair in pairs]

    def output_dim(self, tile: int, g: Int32) -> tuple[Int32, int]:
        return g * 16 + (tile // BLOCKS * (16 * BLOCKS) + tile % BLOCKS * 2), 1


# --- a kernel's forms -------------------------------------------------------------------------------------------------


Format = Kv16Bit | Kv8Bit | Kv4Bit | Kv4BitBlocks


class TileForms(NamedTuple):
    layout: TileLayout
    reads: MatrixReads | BlockReads
    format: Format
    softmax: type[ColumnSoftmax]


def tile_forms(spec: XqaSpec, memory: XqaMemory, arch: Arch) -> TileForms:
    if spec.reads_blocks(arch):
        blocks = BlockLayout(memory.row_bytes)
        return TileForms(
            blocks, BlockReads(memory, blocks), Kv4BitBlocks(memory, blocks, HardwareE2m1()), PackedColumnSoftmax
        )
    form = _format(spec, memory, arch)
    layout = TileLayout(memory.row_bytes)
    packed = spec.kv_bits == 4 and arch.converts_e2m1
    softmax = PackedColumnSoftmax if packed else ColumnSoftmax
    return TileForms(layout, MatrixReads(memory, layout, form.transposed_pairs), form, softmax)


def _format(spec: XqaSpec, memory: XqaMemory, arch: Arch) -> Kv16Bit | Kv8Bit | Kv4Bit:
    if spec.kv_bits == 16:
        return Kv16Bit()
    if spec.kv_bits == 8:
        return Kv8Bit(spec.kv_dtype, arch.converts_e4m3)
    e2m1 = HardwareE2m1() if arch.converts_e2m1 else SpreadBits()
    return Kv4Bit(memory, e2m1, arch.converts_e4m3, spec.paired)
