"""Products of one query tile: S = Q K^T to tensor memory, and O += P V with P in tensor memory, where S was.

Tensor memory: S of query tile 0 and 1, or of even and odd kv tiles, from columns 0 and 128; O from column 256.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import cluster, ptx, sm100
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings
from cute_attn.kernels.blocks.register_layout import RowLayout
from cute_attn.kernels.blocks.sm100 import WARP_LANES
from cute_attn.kernels.fa4.smem import OUTPUT_COLUMN, SCORE_COLUMNS, BlackwellMemory
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS
from cute_attn.kernels.formats import LINE

CHUNK_COLUMNS = 32  # of S, which softmax processes at a time
STEP_BYTES = 32  # of an operand's row per instruction


@dataclass(frozen=True)
class UmmaTile:
    """Operands and products of query tiles of 128 rows."""

    dtype: str
    memory: BlackwellMemory

    @property
    def ctas(self) -> int:
        return self.memory.tile.ctas

    @property
    def p_dtype(self) -> str:
        return self.dtype

    @property
    def scores_layout(self) -> RowLayout:
        """One thread's part of a chunk of scores."""
        return RowLayout(CHUNK_COLUMNS)

    @property
    def chunks(self) -> range:
        return range(self.memory.tile.cols // CHUNK_COLUMNS)

    @property
    def output_columns(self) -> int:
        """Columns of O: a product has a multiple of 16, that of a pair all that its CTAs have of V."""
        if self.ctas == 2:
            return self.memory.vo_columns * self.memory.line_items
        return -(-self.memory.head_dim_vo // 16) * 16

    def scores(self, tmem: Int32, q: Int32, k: Int32, query_tile: int, elected: Int32) -> None:
        """Starts S = Q K^T, from a slot of Q and one of K, to `tmem`."""
        memory, shape = self.memory, self.memory.tile
        steps = []
        for step in range(-(-memory.head_dim_qk * memory.item_bytes // STEP_BYTES)):
            column, within = step // 4, step % 4 * STEP_BYTES
            steps.append((column * shape.cta_rows * LINE + within, column * shape.k_box_rows * LINE + within))
        descriptor = sm100.instruction_descriptor(shape.product_rows, shape.cols, self.dtype, self.dtype)
        q_rows = sm100.matrix_descriptor(q + Int32(query_tile * QUERY_TILE_ROWS * LINE))
        k_rows = sm100.matrix_descriptor(k)
        sm100.mma(sm100.kind_of(self.dtype), tmem, q_rows, k_rows, descriptor, steps, elected, self.ctas)

    def accumulate(self, o: Int32, p: Int32, v: Int32, accumulate: Boolean | bool, elected: Int32) -> None:
        """Starts O (+)= P V, from P in tensor memory and a slot of V, which is MN-major as stored."""
        cols, keys = self.memory.tile.cols, STEP_BYTES // self.memory.item_bytes
        steps = [(i * STEP_BYTES // 4, i * keys * LINE) for i in range(cols // keys)]
        descriptor = sm100.instruction_descriptor(
            self.memory.tile.product_rows, self.output_columns, self.p_dtype, self.dtype, b_mn_major=True
        )
        v_rows = sm100.matrix_descriptor(v, cols * LINE)
        sm100.mma(sm100.kind_of(self.dtype), o, p, v_rows, descriptor, steps, elected, self.ctas, accumulate)

    def probabilities(self, s: list[Float32]) -> list[Int32]:
        """Packs P: columns of tensor memory with two keys each."""
        return ptx.pack_pairs(self.dtype, s)


@dataclass(frozen=True)
class TmemMap:
    """Addresses in tensor memory, from that of the CTA's allocation."""

    base: Int32

    def scores(self, stage: Int32) -> Int32:
        """Returns the address of a stage of S and of P."""
        return self.base + stage * SCORE_COLUMNS

    def output(self, query_tile: int) -> Int32:
        return self.base + Int32(OUTPUT_COLUMN + query_tile * 128)


# --- threads ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowLanes:
    """Position of this thread among those of its warpgroup, which own the rows of a query tile."""

    query_tile: Int32  # of the CTA
    number: Int32  # of the query tile in the work item
    warp: Int32  # within the warpgroup
    lane: Int32

    @classmethod
    def of(cls, query_tile: Int32, ctas: int) -> "RowLanes":
        """Reads the thread index at each call, so that values derived from it need not stay in registers in between.
        Query tiles of the same number in the CTAs of a pair are consecutive in the work item.
        """
        thread = ptx.thread_index()
        number = query_tile if ctas == 1 else query_tile * ctas + cluster.rank()
        return cls(query_tile, number, cute.arch.make_warp_uniform((thread >> 5) & 3), thread & 31)

    @property
    def lane_row(self) -> Int32:
        """Row of the thread within its query tile: its lane of tensor memory."""
        return self.warp * 32 + self.lane

    @property
    def tmem(self) -> Int32:
        """Offset of the warp's lanes in tensor memory."""
        return self.warp * WARP_LANES

    def row(self, slot: int) -> Int32:
        return self.number * QUERY_TILE_ROWS + self.lane_row


# --- rings ------------------------------------------------------------------------------------------------------------


class TmemRing(Ring):
    """Ring whose one or two slots lie in tensor memory: slot and phase are bits of the pipeline state, which needs no
    comparisons. Fewer instructions per kv tile in every role.
    """

    def parity(self, state: PipelineState) -> Int32:
        return state.index_phase >> (self.stages - 1)

    def next(self, state: PipelineState) -> PipelineState:
        return PipelineState((state.index_phase + 1) & Int32(2 * self.stages - 1))


@dataclass(frozen=True)
class BlackwellRings(SmemRings):
    """Rings of a CTA. Subclasses name the types of rings that several CTAs share."""

    tmem_ring: ClassVar[type[Ring]] = TmemRing
    shared: ClassVar[Mapping[str, type[Ring]]] = {}

    @classmethod
    def ring_types(cls, memory: BlackwellMemory) -> Mapping[str, type[Ring]]:
        in_tmem = (f"{ring}{i}" for i in range(memory.tile.query_tiles) for ring in "so")
        return {**dict.fromkeys(in_tmem, cls.tmem_ring), **cls.shared}
