"""Shared and tensor memory of the decode kernel on tcgen05. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import RingLayout, RingMemory, Scratch
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

SOFTMAX_WARPS = 4
SCORE_STAGES, Q_STAGES = 2, 2


@dataclass(frozen=True)
class UmmaMemory(RingMemory):
    """Rings, in order of address, and scratch. Operands are stored in columns of lines, swizzled as TMA does.

    "kv" holds pieces of K and V as stored, in the order of their use: K of tile 0, then K of tile i + 1 and V of tile i
    in turn. "q" has the rows of two segments, one term behind the other. A token of "p" has a line in each column, with
    the probabilities of all rows, one term behind the other. Rings of no bytes hand over what lies in tensor memory:
    "s" the scores, "o" the outputs.
    """

    spec: XqaUmmaSpec

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        spec = self.spec
        p_lines = -(-self.output_columns * spec.item_bytes // LINE)  # of a token's probabilities
        return (
            RingLayout("kv", spec.stages, spec.cols * spec.piece_dim * spec.item_bytes),
            RingLayout("q", Q_STAGES, self.score_columns * spec.head_dim * spec.item_bytes),
            RingLayout("p", 1, p_lines * spec.cols * LINE),
            RingLayout("s", SCORE_STAGES, 0),
            RingLayout("o", 1, 0),
        )

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        spec = self.spec
        return (
            Scratch("outputs", spec.rows * spec.head_dim * 4),
            Scratch("stats", spec.rows * 8),
            Scratch("shifts", spec.rows * 4),  # negated anchors in log2 units
            Scratch("factors", spec.rows * 4),  # of outputs and sums where anchors move
            Scratch("columns", SOFTMAX_WARPS * spec.rows * 4),  # what a column has in each warp
            *((Scratch("q_scales", 16),) if spec.q_terms > 1 else ()),  # from products to exponents, by slot of q
            Scratch("ticket", 16),
            Scratch("tmem", 16),
        )

    # --- as the merge of XQA reads it: one state ---------------------------------------------------------------------

    ring_bytes = 0  # distance of the outputs of two states

    @property
    def tile_dim(self) -> int:
        """Columns of an output row."""
        return self.spec.head_dim

    @property
    def outputs(self) -> int:
        return self.offset("outputs")

    @property
    def stats(self) -> int:
        return self.offset("stats")

    @property
    def ticket(self) -> int:
        return self.offset("ticket")

    # --- tensor memory -----------------------------------------------------------------------------------------------

    @property
    def score_columns(self) -> int:
        """Columns of S^T: the N of K Q^T."""
        return self.spec.q_terms * self.spec.rows

    @property
    def output_columns(self) -> int:
        """Columns of a piece of O^T: the N of V^T P."""
        return self.spec.p_terms * self.spec.rows

    @property
    def output_column(self) -> int:
        """Column from which O^T lies, a piece after the other; S^T of even and odd tiles is before it."""
        return SCORE_STAGES * self.score_columns

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two."""
        used = self.output_column + self.spec.pieces * self.output_columns
        return max(32, 1 << (used - 1).bit_length())
