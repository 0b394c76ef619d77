"""Schedules of single requests for the mma.sync kernel: the tile, and how the keys are split."""

from __future__ import annotations

import functools

from cute_attn.kernels.fa2.host.batch import MANY_ROWS, tiling
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.single import SingleSchedule
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule import split_kv as split_kv_rules
from cute_attn.schedule.batch import TileShape


class Scheduler:
    """Schedules of requests with the same settings. A tiling is memoised apart from the keys' length, which grows in
    every step of a decode.
    """

    def __init__(self, settings: Settings, arch: Arch, sms: int) -> None:
        features = settings.features
        self.group = features.num_qo_heads // features.num_kv_heads
        self.causal, self.window_left = settings.causal, settings.window_left

        def of_rows(rows: int) -> tuple[Tile, TileShape]:
            return tiling(settings, rows, arch, sms)

        self.tiling = functools.cache(of_rows)  # of at most MANY_ROWS rows

    def __call__(self, qo_len: int, kv_len: int) -> SingleSchedule[Tile]:
        rows, window_left, position = qo_len * self.group, self.window_left, kv_len - qo_len  # of query row 0
        tile, shape = self.tiling(min(rows, MANY_ROWS))
        ctas = -(-rows // tile.rows) * shape.num_kv_heads
        kv_tiles = visible_tiles = -(-kv_len // tile.cols)
        if window_left >= 0:
            tokens = (tile.rows - 1) // self.group + 2  # that one query tile can touch
            visible = split_kv_rules.visible_tokens(qo_len, kv_len, tokens, self.causal, window_left)
            visible_tiles = split_kv_rules.ceil_div(visible, tile.cols)
        num_splits, tiles_per_split = split_kv_rules.split_kv(
            kv_tiles, visible_tiles, ctas, shape.resident_ctas, shape.min_split_tiles
        )
        right = position if self.causal else UNBOUNDED
        left = position - window_left if 0 <= window_left < kv_len else -UNBOUNDED
        numbers = qo_len, kv_len, right, left, tiles_per_split
        return SingleSchedule(tile, self.group, num_splits, (ctas, 1, num_splits), numbers)
