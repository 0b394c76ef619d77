"""Schedules of single requests for the mma.sync kernel: the tile, and the split of the keys."""

from __future__ import annotations

import functools

from cute_attn.kernels.fa2.host.batch import MANY_ROWS, tiling
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.single import MAX_LENGTHS, SingleSchedule
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.split_kv import ceil_div, split_kv, visible_tokens


class Scheduler:
    """Schedules requests with the same settings. A tiling is memoised by query rows only, because the number of keys
    grows in every step of a decode.
    """

    def __init__(self, settings: Settings, arch: Arch, sms: int) -> None:
        features = settings.features
        self.group_size = features.num_qo_heads // features.num_kv_heads
        self.causal, self.window_left = settings.causal, settings.window_left

        def tiling_of(rows: int) -> Tiling[Tile]:
            return tiling(settings, rows, arch, sms)

        self.tiling = functools.lru_cache(MAX_LENGTHS)(tiling_of)

    def __call__(self, qo_len: int, kv_len: int) -> SingleSchedule[Tile]:
        """Returns the schedule of a request with these lengths."""
        rows, window_left, position = qo_len * self.group_size, self.window_left, kv_len - qo_len  # of query row 0
        chosen = self.tiling(min(rows, MANY_ROWS))
        tile, params = chosen.tile, chosen.params
        ctas = -(-rows // tile.rows) * params.num_kv_heads
        kv_tiles = visible_tiles = -(-kv_len // tile.cols)
        if window_left >= 0:
            tokens = (tile.rows - 1) // self.group_size + 2  # that one query tile can touch
            visible = visible_tokens(qo_len, kv_len, tokens, self.causal, window_left)
            visible_tiles = ceil_div(visible, tile.cols)
        num_splits, tiles_per_split = split_kv(
            kv_tiles, visible_tiles, ctas, params.resident_ctas, params.min_split_tiles
        )
        right = position if self.causal else UNBOUNDED
        left = position - window_left if 0 <= window_left < kv_len else -UNBOUNDED
        numbers = qo_len, kv_len, right, left, tiles_per_split
        return SingleSchedule(tile, self.group_size, num_splits, (ctas, 1, num_splits), numbers)
