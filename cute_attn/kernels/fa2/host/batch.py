"""Schedules of batches for the mma.sync kernel."""

from __future__ import annotations

import functools

from cute_attn.kernels.fa2 import tiles as fa2_tiles
from cute_attn.kernels.fa2.host.variant import variant
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host.batch import BatchSchedule
from cute_attn.problem import BatchLengths, BatchLimits, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule import split_kv as split_kv_rules
from cute_attn.schedule.batch import TileShape

MANY_ROWS = fa2_tiles.APPEND_ROWS + 1  # packed rows of a request: no tile is chosen for more


def schedule(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: batch_schedule.Memory = batch_schedule.new_ints,
) -> BatchSchedule[Tile]:
    """The schedule of a batch on a GPU of `arch` with `sms` multiprocessors."""
    features = settings.features
    rows = batch_schedule.rows_of_a_request(lengths, limits) * (features.num_qo_heads // features.num_kv_heads)
    return host_batch.schedule(tiling(settings, min(rows, MANY_ROWS), arch, sms), lengths, limits, memory, sms)


@functools.lru_cache(host_batch.MAX_SETTINGS)
def tiling(settings: Settings, rows: int, arch: Arch, sms: int) -> tuple[Tile, TileShape]:
    """The tile for requests of `rows` packed rows, and what the schedule must know of it."""
    features = settings.features
    kind = variant(features)
    tile = fa2_tiles.choose(kind, rows, arch)
    return tile, TileShape(
        tile.rows,
        tile.cols,
        features.num_qo_heads // features.num_kv_heads,
        features.num_kv_heads,
        settings.causal,
        settings.window_left,
        sms * fa2_tiles.resident_ctas(tile, kind, arch),
        split_kv_rules.min_split_tiles(tile.rows, tile.cols, *kind.head_dims),
        4 * (features.head_dim_vo + 1),
    )
