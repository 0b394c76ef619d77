"""Tiles for the mma.sync kernel, of batches and of single requests."""

from __future__ import annotations

from cute_attn.kernels.fa2 import tiles
from cute_attn.kernels.fa2.host.variant import variant
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.prepared import Grid, prepared
from cute_attn.problem import BatchLengths, BatchLimits, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.param_block import Values
from cute_attn.schedule.batch import SchedulerParams, typical_qo_len
from cute_attn.schedule.split_kv import Split, ceil_div, min_split_tiles

MANY_ROWS = tiles.APPEND_ROWS + 1  # packed rows of a request: no tile is chosen for more


def batch_tiling(settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int) -> Tiling[Tile]:
    """Returns the tiling of a batch on a GPU of `arch` with `sms` multiprocessors."""
    features = settings.features
    if features.chunk_invariant:  # with many rows a decode step has the bits of a prefill
        return prepared(tiling, settings, MANY_ROWS, arch, sms)
    return request_tiling(settings, typical_qo_len(lengths, limits), 0, arch, sms)


def request_tiling(settings: Settings, qo_len: int, kv_len: int, arch: Arch, sms: int) -> Tiling[Tile]:
    """Returns the tiling of requests with these lengths."""
    rows = qo_len * settings.features.num_qo_heads // settings.features.num_kv_heads
    return prepared(tiling, settings, min(rows, MANY_ROWS), arch, sms)


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


def request_launch(
    settings: Settings, tiling: Tiling[Tile], split: Split, qo_len: int, kv_len: int
) -> tuple[Grid, Values]:
    """Returns the grid of a single request, and the values of LENGTH_FIELDS."""
    position, window_left = kv_len - qo_len, settings.window_left  # of query row 0
    right = position if settings.causal else UNBOUNDED
    left = position - window_left if 0 <= window_left < kv_len else -UNBOUNDED
    ctas = ceil_div(qo_len * tiling.params.group_size, tiling.params.rows) * tiling.params.num_kv_heads
    return (ctas, 1, split.num_splits), (qo_len, kv_len, right, left, split.tiles_per_split)
