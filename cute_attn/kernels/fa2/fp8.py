"""mma.sync kernel for q, k and v in fp8: the loop of the 16-bit kernel over 8-bit tiles, multiplied as stored.

For GPUs whose mma.sync multiplies fp8 itself (sm_120a, sm_121a): for sm_100a ptxas makes it conversions and 16-bit
products.

P is e4m3. As an A operand, it needs four adjacent columns per lane; the accumulator of S gives two of one block of
eight and two of the next. No registers are shuffled: the columns of P are permuted tokens, and V is read in the same
order. `ldmatrix.trans` of 16-bit units gives a lane two adjacent dimensions of two adjacent tokens; two byte
permutations gather the even and the odd dimension of four tokens. So an accumulator block holds every other dimension
of 16.

    lane q of a quad       tokens 2q, 2q+1 | 8+2q, 9+2q  = word 0 of P's row;  16+2q, 17+2q | 24+2q, 25+2q = word 1
    outputs                block 2j: dimensions 16j + {4q, 4q+2};  block 2j+1: 16j + {4q+1, 4q+3}
"""

import math
from dataclasses import dataclass

from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, ScaledPartialEpilogue
from cute_attn.kernels.blocks.program import Epilogues
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.scalars import head_scale
from cute_attn.kernels.blocks.scores import RowScales
from cute_attn.kernels.blocks.smem import swizzled_offset
from cute_attn.kernels.blocks.softmax import P_DTYPE, P_MAX, E4m3Softmax, RunningSoftmax
from cute_attn.kernels.fa2.kernel import Fa2Params, Fa2Program
from cute_attn.kernels.fa2.parts.mma import Lanes, WarpTile
from cute_attn.kernels.fa2.parts.tile_scheduler import WorkTile

STEP = 32  # tokens of a product with V
EVEN, ODD = 0x6420, 0x7531  # bytes of two words
FENCE = 2  # blocks of 16 dimensions between fences


@dataclass(frozen=True)
class QuadLayout(MmaFragmentLayout):
    """Output accumulator in which the lanes of a quad hold four adjacent columns of every 16: block 2 j the first two,
    block 2 j + 1 the others.
    """

    @staticmethod
    def column(n: int) -> int:
        return n // 2 * 16 + n % 2 * 2

    @classmethod
    def lane_col(cls, lane: Int32) -> Int32:
        return cls.quad_lane(lane) * 4


@dataclass(frozen=True)
class Fp8WarpTile(WarpTile):
    """Warp tile of 8-bit operands; P is e4m3 whatever they are."""

    @property
    def output_layout(self) -> QuadLayout:
        return QuadLayout(self.m_blocks, self.d_blocks)

    def accumulate(self, out: list[Float32], p: list[list[list[Int32]]], v: Int32) -> list[Float32]:
        """Returns out + P V. Tensor cores sum the tokens of one tile only: how many bits their sums of fp8 products
        have is not documented, and `out` is a sum of all tiles in fp32.
        """
        acc = list(out)
        for pair in range(self.d_blocks // 2):
            if pair % FENCE == 0:
                ptx.sync_warp()  # without it ptxas loads V far ahead, and spills
            for m, (even, odd) in enumerate(self.products(p, v, pair)):
                upper, lower = ([even[i], odd[i], even[i + 1], odd[i + 1]] for i in (0, 2))
                block, mate = (self.output_layout.block(m, 2 * pair + i) for i in (0, 1))
                for at, x in ((block, upper[:2]), (block + 2, lower[:2]), (mate, upper[2:]), (mate + 2, lower[2:])):
                    acc[at : at + 2] = [acc[at] + x[0], acc[at + 1] + x[1]]
        return acc

    def products(self, p: list[list[list[Int32]]], v: Int32, pair: int) -> list[list[list[Float32]]]:
        """Computes P V of 16 dimensions: per block of rows, accumulators of the even and of the odd ones."""
        v_at, v_offset = swizzled_offset(v, pair)
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(self.m_blocks)]
        for step in range(len(p[0])):
            a, b, c, d = ptx.ldmatrix_x4(v_at, step * STEP * self.memory.vo_pitch + v_offset, transpose=True)
            columns = [[ptx.permute(x, y, bytes_) for x, y in ((a, b), (c, d))] for bytes_ in (EVEN, ODD)]
            for rows, acc in zip(p, sums, strict=True):
                acc[:] = [
                    ptx.mma(P_DTYPE, self.dtype, rows[step], column, old)
                    for column, old in zip(columns, acc, strict=True)
                ]
        return sums

    def probabilities(self, s: list[Float32]) -> list[list[list[Int32]]]:
        """Rounds fp32 accumulator blocks to e4m3: four C blocks are one A operand of permuted tokens."""
        layout = self.scores_layout
        packed = []
        for m in range(self.m_blocks):
            steps = []
            for n in range(0, self.n_blocks, 4):
                blocks = [s[layout.block(m, n + i) : layout.block(m, n + i) + 4] for i in range(4)]
                words = ((blocks[i], blocks[i + 1], row) for i in (0, 2) for row in (0, 2))
                steps.append([ptx.pack_8(P_DTYPE, [*x[row : row + 2], *y[row : row + 2]]) for x, y, row in words])
            packed.append(steps)
        return packed


@dataclass(frozen=True, kw_only=True)
class Fp8Softmax(E4m3Softmax, RunningSoftmax):
    """Softmax whose largest P of a row is near e4m3's upper end, so that those far below it do not underflow."""

    p_log2 = 7.0

    @property
    def slack(self) -> float:
        return math.log2(P_MAX) - 0.01


# --- the kernel -------------------------------------------------------------------------------------------------------


class Fp8Program(Fa2Program):
    """mma.sync kernel for q, k and v in fp8, with scales per head."""

    tile_type = Fp8WarpTile
    softmax_type = Fp8Softmax
    min_ctas = 1  # without it ptxas spills a word or two to reach 128 or 168 registers

    def scale_step(self, p: Fa2Params, work: WorkTile, lanes: Lanes, scales: list[Float32]) -> RowScales:
        """Returns the scales of the thread's rows, which may have any sign."""
        common, rows = scales[0] * head_scale(p.scale_k, work.kv_head), work.rows(p)
        layout = self.tile.scores_layout
        scales = [common * head_scale(p.scale_q, rows.head(lanes.row(slot))) for slot in layout.slots]
        return RowScales(layout, lambda: scales)

    def epilogues(self, p: Fa2Params, work: WorkTile) -> Epilogues:
        return (
            lambda: FinalEpilogue.of(p).scaled(head_scale(p.scale_v, work.kv_head)),
            lambda: ScaledPartialEpilogue(head_scale(p.scale_v, work.kv_head)),
        )
