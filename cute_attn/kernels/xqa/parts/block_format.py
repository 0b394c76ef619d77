"""NVFP4 where a lane holds whole scale blocks, for GPUs that convert e2m1 and transpose bytes (sm_100 and later)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.e2m1 import HardwareE2m1
from cute_attn.kernels.xqa.parts.formats import LoadQ, Operand, OwnP, ScalesOf, e4m3_halves, flatten
from cute_attn.kernels.xqa.parts.layouts import BlockLayout
from cute_attn.kernels.xqa.smem import XqaMemory

BLOCKS = 8  # of V that the lanes of a warp hold at once, one for each g
MATRIX = 256  # bytes of the matrix whose bytes `ldmatrix` transposes


@dataclass(frozen=True)
class Kv4BitBlocks(OwnP):
    """`Kv4Bit` for `BlockReads`: 32 elements of K per lane, token and read, two scale blocks; 16 of V, one.

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
        count = self.memory.cols * size // MATRIX
        words = flatten([isa.ldmatrix_bytes(at, i * MATRIX, min(2, count - i)) for i in range(0, count, 2)])
        groups = size // BLOCKS
        return lambda m: [e4m3_halves(word, True) for word in words[m * groups : (m + 1) * groups]]

    def k_operands(self, loaded: Operand, group: int, scales: list[Operand]) -> list[Operand]:
        """Use a lane's pairs as contraction indices 2t, 2t + 1 (the first and third) or 2t + 8, 2t + 9."""
        operands = []
        for i in range(4):
            a, b = (
                [isa.scale_f16x2(pair, scale, i // 2) for pair in self.e2m1.k_pairs(word)]
                for word, scale in zip((loaded[i], loaded[4 + i]), scales[group], strict=True)
            )
            operands += [[a[j], b[j], a[j + 1], b[j + 1]] for j in (0, 2)]
        return operands

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
