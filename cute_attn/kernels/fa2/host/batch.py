"""Tiles of batches for the mma.sync kernel."""

from __future__ import annotations

from cute_attn.kernels.fa2 import tiles
from cute_attn.kernels.fa2.host.variant import variant
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.prepared import prepared
from cute_attn.problem import BatchLengths, BatchLimits, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.batch import SchedulerParams, typical_qo_len
from cute_attn.schedule.split_kv import min_split_tiles

MANY_ROWS = tiles.APPEND_ROWS + 1  # packed rows of a request: no tile is chosen for more


def batch_tiling(settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int) -> Tiling[Tile]:
    """Returns the tiling of a batch on a GPU of `arch` with `sms` multiprocessors."""
    features = settings.features
    rows = MANY_ROWS  # with which a decode step has the bits of a prefill
    if not features.chunk_invariant:
        rows = min(typical_qo_len(lengths, limits) * features.num_qo_heads // features.num_kv_heads, MANY_ROWS)
    return prepared(tiling, settings, rows, arch, sms)


def tiling(settings: Settings, rows: int, arch: Arch, sms: int) -> Tiling[Tile]:
    """Returns the tiling for requests of `rows` packed rows."""
    features = settings.features
    kind = variant(features)
    tile = tiles.choose(kind, rows, arch)
    params = SchedulerParams(
        rows=tile.rows,
        cols=tile.cols,
        group_size=features.num_qo_heads // features.num_kv_heads,
        num_kv_heads=features.num_kv_heads,
        causal=settings.causal,
        window_left=settings.window_left,
        resident_ctas=sms * tiles.resident_ctas(tile, kind, arch),
        min_split_tiles=min_split_tiles(tile.rows, tile.cols, *kind.head_dims),
        partial_row_bytes=4 * (features.head_dim_vo + 1),
    )
    return Tiling(tile, params)
