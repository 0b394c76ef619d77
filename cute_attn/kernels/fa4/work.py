"""Kv tiles of each query tile of a work item, as all roles count them."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.masks import TileOrder
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS


@dataclass(frozen=True)
class KvSteps:
    """Steps over the kv tiles of a work item. Query tile i takes part in the steps from `first[i]`: the right edge of
    the mask comes first, and earlier rows see less of it. Without rows or a visible key, that is `order.total`.
    """

    order: TileOrder
    first: tuple[Int32, ...]

    @classmethod
    def of(cls, p: PersistentParams, work: QueryTile, order: TileOrder, query_tiles: int, cols: int) -> "KvSteps":
        rows, band, first = work.rows(p), work.band(p), []
        for i in range(query_tiles):
            row = Int32(i * QUERY_TILE_ROWS)
            stop = band.stop(rows.last_token_from(row, QUERY_TILE_ROWS))
            end = (ptx.maximum(stop, Int32(0)) + Int32(cols - 1)) // cols
            beyond = ptx.minimum(ptx.maximum(order.end - end, Int32(0)), order.end - order.full_end)
            idle = cutlass.or_(end <= order.begin, rows.exists(row) == cutlass.Boolean(False))
            first.append(ptx.select(idle, order.total, beyond))
        return cls(order, tuple(first))
