"""Maps of shared and tensor memory of the Blackwell kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.blocks.smem_map import LoadedRows, RingLayout, Scratch, StagedKvMemory, TileMemory
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS, BlackwellTile, Fa4Spec
from cute_attn.kernels.formats import LINE
from cute_attn.runtime.arch import named

ARCH = "sm_100a"  # sm_103a has as much shared memory
STATS_BYTES = 2 * 4 * QUERY_TILE_ROWS  # shift and sum of each row of a query tile
SCORE_COLUMNS = 128  # of tensor memory, of S and of P in its place
Q_STAGES = 1  # shared memory has no room for the query tiles of two work items
OUTPUT_COLUMN = 256  # of tensor memory, the first of O


@dataclass(frozen=True)
class BlackwellMemory(TileMemory):
    """Layout for 16-bit q, k and v.

    Besides the operands, rings of no bytes hand over what lies in tensor memory: S of query tile i is filled by the
    products and released by softmax as P ("s0", "s1"); O is filled by the last product and released by the epilogue
    ("o0", "o1"). "tail" tells the products that the rows of V past the keys are cleared. "next" tells both CTAs of a
    pair that the index of their next work item is in the record of this one. "staging" holds a query tile of outputs
    for TMA to store.
    """

    tile: BlackwellTile
    clears_tail: bool = False
    staging_bytes: int = 0

    @staticmethod
    def of(spec: Fa4Spec) -> BlackwellMemory:
        """Returns the layout of a spec; 16-bit outputs are staged where there is room."""
        shape, kind = (spec.tile, spec.head_dim_qk, spec.head_dim_vo), Fp8Memory if spec.fp8 else BlackwellMemory
        direct = kind(*shape, spec.clears_tail)
        if spec.kv_dtype:
            direct = Fp8KvMemory(*shape, normalizes_q=spec.normalizes_q)
        staging = QUERY_TILE_ROWS * direct.output_columns * LINE if spec.out_dtype != "float32" else 0
        staged = dataclasses.replace(direct, staging_bytes=staging)
        return staged if staged.bytes <= named(ARCH).smem_limit else direct

    @property
    def output_columns(self) -> int:
        """Lines of a 16-bit output row."""
        return -(-2 * self.head_dim_vo // LINE)

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        tile = self.tile
        operands = (
            RingLayout("q", Q_STAGES, tile.cta_rows * self.qk_columns * LINE),
            RingLayout("k", tile.k_stages, tile.k_box_rows * self.qk_columns * LINE),
            RingLayout("v", tile.v_stages, tile.cols * (self.vo_columns // tile.ctas) * LINE),
        )
        tail = (RingLayout("tail", 1, 0),) if self.clears_tail else ()
        drawn = (RingLayout("next", Q_STAGES, 0),) if tile.ctas == 2 else ()
        score_stages = 3 - tile.query_tiles
        handed_over = [
            ring
            for i in range(tile.query_tiles)
            for ring in (
                RingLayout(f"s{i}", score_stages, 0),
                RingLayout(f"o{i}", 1, 0),
                RingLayout(f"stats{i}", 1, STATS_BYTES),
            )
        ]
        return (*operands, *tail, *handed_over, *drawn)

    @property
    def vo_columns(self) -> int:
        """Columns of V in all CTAs, which have equal parts of it."""
        return -(-super().vo_columns // self.tile.ctas) * self.tile.ctas

    def loaded(self, operand: str) -> LoadedRows:
        """A CTA of a pair loads half of the columns of V, and half of the rows of K."""
        columns = self.columns(operand) // (self.tile.ctas if operand == "v" else 1)
        return LoadedRows(columns, self.line_items, LINE)

    @property
    def scratch(self) -> tuple[Scratch, ...]:
        staging = (Scratch("staging", self.staging_bytes),) if self.staging_bytes else ()
        return (*staging, Scratch("tmem", 16))  # address of the allocation


@dataclass(frozen=True)
class Fp8Memory(BlackwellMemory):
    """Layout for q, k and v in fp8: as much as theirs in 16 bits, of twice the elements per line."""

    item_bytes: ClassVar[int] = 1


@dataclass(frozen=True)
class Fp8KvMemory(StagedKvMemory, BlackwellMemory):
    """Layout for fp8 K and V under 16-bit q: their tiles are also staged as stored. "normalized" tells the products
    that softmax has converted the rows of a slot of "q".
    """

    tile: BlackwellTile
    normalizes_q: bool = False

    @property
    def rings(self) -> tuple[RingLayout, ...]:
        normalized = (RingLayout("normalized", Q_STAGES, 0),) if self.normalizes_q else ()
        return (*super().rings, *normalized, *self.staged_rings(self.tile.staged))
