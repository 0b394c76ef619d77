"""Shared and tensor memory of the decode kernel on tcgen05. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import RingLayout, Scratch, SmemMap
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

ITEM_BYTES = 2
SOFTMAX_WARPS = 4
SCORE_STAGES, Q_STAGES = 2, 2


@dataclass(frozen=True)
class UmmaMemory:
    """Rings, in order of address, and scratch. Operands are stored in columns of 128-byte lines, swizzled as TMA does.

    "kv" holds pieces of K and V in the order of their use: K of tile 0, then K of tile i + 1 and V of tile i in turn.
    Where they have 8 bits, "staged" has them as stored, in contiguous rows. "q" has the rows of two segments;
    "normalized" tells that they are converted. A line of "p" has the probabilities of a token, for up to 64 rows. Rings
    of no bytes hand over what lies in tensor memory: "s" the scores, "o" the outputs.
    """

    spec: XqaUmmaSpec

    @property
    def map(self) -> SmemMap:
        spec = self.spec
        staged = (RingLayout("staged", spec.staged, spec.cols * spec.piece_dim),) if spec.staged else ()
        normalized = (RingLayout("normalized", Q_STAGES, 0),) if spec.normalizes_q else ()
        rings = (
            RingLayout("kv", spec.stages, spec.cols * spec.piece_dim * ITEM_BYTES),
            *staged,
            RingLayout("q", Q_STAGES, spec.rows * spec.head_dim * ITEM_BYTES),
            *normalized,
            RingLayout("p", 1, spec.cols * LINE),
            RingLayout("s", SCORE_STAGES, 0),
            RingLayout("o", 1, 0),
        )
        # Factors of scores, and the largest magnitude in each transform warp.
        converted = (Scratch("q_factors", 16), Scratch("q_largest", 16))
        scratch = (
            Scratch("outputs", spec.rows * spec.head_dim * 4),
            Scratch("stats", spec.rows * 8),
            Scratch("shifts", spec.rows * 4),  # negated anchors in log2 units
            Scratch("factors", spec.rows * 4),  # of outputs and sums where anchors move
            Scratch("columns", SOFTMAX_WARPS * spec.rows * 4),  # what a column has in each warp
            *(converted if spec.normalizes_q else ()),
            Scratch("ticket", 16),
            Scratch("tmem", 16),
        )
        return SmemMap(rings, scratch)

    @property
    def loaded_ring(self) -> str:
        """Ring into which K and V are loaded."""
        return "staged" if self.spec.staged else "kv"

    @property
    def bytes(self) -> int:
        return self.map.bytes

    # --- as the merge of XQA reads it: one state ---------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.spec.rows

    @property
    def ring_bytes(self) -> int:
        """Distance of the outputs of two states."""
        return 0

    @property
    def outputs(self) -> int:
        return self.map.offset("outputs")

    @property
    def stats(self) -> int:
        return self.map.offset("stats")

    @property
    def ticket(self) -> int:
        return self.map.offset("ticket")

    # --- tensor memory -----------------------------------------------------------------------------------------------

    @property
    def output_column(self) -> int:
        """Column from which O^T lies, a piece after the other; S^T of even and odd tiles is before it."""
        return SCORE_STAGES * self.spec.rows

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two."""
        used = self.output_column + self.spec.pieces * self.spec.rows
        return max(32, 1 << (used - 1).bit_length())
