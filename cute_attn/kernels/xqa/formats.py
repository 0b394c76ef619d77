"""What K and V are made of: from the registers that ldmatrix fills to operands of 16-bit matrix instructions.

Both products have K or V as their A operand, 16 rows x 16 of the contraction:

    S^T [kv tokens, rows] = K   Q^T        rows of A: tokens        contraction: head dim
    O^T [head dim,  rows] = V^T P^T        rows of A: head dim      contraction: tokens

so that the few query rows are the 8 columns of an instruction. ldmatrix moves 16-bit units. Of elements that are
smaller, a lane then holds neighbours in the head dim where the instruction expects others; since the order of a
contraction is free, Q is loaded in the same order (`Q_ORDER`), and the rows of O^T that come out in another order are
put right when they are stored (`output_dim`).

Conversions are exact. What they leave out, a power of two, is `k_factor` and `v_factor`.
"""

from dataclasses import dataclass

from cutlass import Int32

from cute_attn.kernels.xqa import instructions as isa

Operand = list[Int32]


@dataclass(frozen=True)
class Sixteen:
    """fp16 and bf16 as they are."""

    operands_per_load = 1  # operands in one ldmatrix.x4
    transposed_pairs = True  # V: the x4 matrices are (tokens, dims) = (0, 0), (0, 8), (8, 0), (8, 8)
    k_factor = v_factor = 1.0

    def k_operands(self, loaded: Operand) -> list[Operand]:
        return [loaded]

    def v_operands(self, loaded: Operand) -> list[Operand]:
        return [loaded]

    def output_dim(self, tile: int, g: Int32) -> tuple[Int32, int]:
        """Dimension of row g of output tile `tile`, and how far from it that of row g + 8 is."""
        return g + 16 * tile, 8


@dataclass(frozen=True)
class Eight:
    """e4m3 and e5m2: four elements a register, two operands a load."""

    dtype: str
    native: bool  # the GPU converts e4m3 (sm_89 and later)

    operands_per_load = 2
    transposed_pairs = False  # V: (tokens, chunks) = (0, 0), (8, 0), (0, 1), (8, 1), as K

    @property
    def k_factor(self) -> float:
        return 256.0 if self.dtype == "float8_e4m3fn" and not self.native else 1.0

    @property
    def v_factor(self) -> float:
        return self.k_factor

    def k_operands(self, loaded: Operand) -> list[Operand]:
        """A lane's four bytes are dims 4t .. 4t + 3 of a token: contraction indices 2t, 2t + 1, 2t + 8, 2t + 9."""
        halves = [self.halves(x) for x in loaded]
        return [[halves[i][0], halves[i + 1][0], halves[i][1], halves[i + 1][1]] for i in (0, 2)]

    def v_operands(self, loaded: Operand) -> list[Operand]:
        """A lane's four bytes are dims 2g, 2g + 1 of token 2t, then of token 2t + 1: regrouped into token pairs."""
        halves = [self.halves(isa.permute(x, x, 0x3120)) for x in loaded]
        return [[halves[i][0], halves[i][1], halves[i + 1][0], halves[i + 1][1]] for i in (0, 2)]

    def output_dim(self, tile: int, g: Int32) -> tuple[Int32, int]:
        return g * 2 + 16 * tile, 1

    def halves(self, x: Int32) -> list[Int32]:
        """Bytes (0, 1) and (2, 3) as f16x2."""
        if self.dtype == "float8_e5m2":
            return [isa.permute(x, Int32(0), 0x1404), isa.permute(x, Int32(0), 0x3424)]
        if self.native:
            return [isa.e4m3_pair(x, 0), isa.e4m3_pair(x, 1)]
        # Sign to bit 15, the other seven bits to 13..7: the fp16 number is 2^-8 times the e4m3 number.
        return [self._shifted(isa.permute(x, Int32(0), selector)) for selector in (0x1404, 0x3424)]

    def _shifted(self, x: Int32) -> Int32:
        moved = isa.asm("shr.u32 $0, $1, 1;", [Int32], [x], pure=True)
        return (x & Int32(-0x7FFF8000)) | (moved & Int32(0x3F803F80))


def make(kv_dtype: str, native: bool) -> Sixteen | Eight:
    return Sixteen() if kv_dtype in ("float16", "bfloat16") else Eight(kv_dtype, native)
