"""Kv tiles of each query tile of a work item, as all roles count them, and which products of them are complete."""

from dataclasses import dataclass

from cutlass import Int32

from cute_attn.kernels.blocks import sm100
from cute_attn.kernels.blocks.masks import TileOrder
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.spec import BlackwellTile


@dataclass(frozen=True)
class KvSteps:
    """Steps over the kv tiles of a work item. Query tile i takes part in the steps from `first[i]`: the right edge of
    the mask comes first, and earlier rows see less of it. Without rows or a visible key, that is `order.total`. Query
    tiles of the same number in the CTAs of a pair take part together.
    """

    order: TileOrder
    first: tuple[Int32, ...]

    @classmethod
    def of(cls, p: PersistentParams, work: QueryTile, order: TileOrder, tile: BlackwellTile) -> "KvSteps":
        rows, band, count = work.rows(p), work.band(p), tile.product_rows
        first = [order.skipped(band, rows, Int32(i * count), count, tile.cols) for i in range(tile.query_tiles)]
        return cls(order, tuple(first))


class CoveredProducts:
    """Products of O up to the kv tile before, which the commit of S covers: its thread started them earlier."""

    def at(self, ring: Ring, s: PipelineState) -> "CoveredProducts":
        return self

    def wait(self) -> None:
        """Waits until the products are complete."""


@dataclass(frozen=True)
class OutstandingProducts(CoveredProducts):
    """The same where S is started earlier: the last product has released its slot of V once it is complete. V's ring
    has the stages of S and is at the same state. The slot is not released again before this kv tile's P is read.
    """

    v: Ring
    before: PipelineState  # of the kv tile before

    def at(self, ring: Ring, s: PipelineState) -> "OutstandingProducts":
        return OutstandingProducts(self.v, ring.previous(s))

    def wait(self) -> None:
        self.v.wait_released(self.before)
        sm100.fence_after_sync()
