"""Schedules of single requests for the mma.sync kernel: the tile, and the split of the keys."""

from __future__ import annotations

from cute_attn.kernels.fa2.host.batch import MANY_ROWS, tiling
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.host.single import SingleSchedule
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.split_kv import ceil_div, split_kv, visible_tokens


class Scheduler:
    """Schedules requests with the same settings."""

    def __init__(self, settings: Settings, arch: Arch, sms: int) -> None:
        features = settings.features
        self.group_size = features.num_qo_heads // features.num_kv_heads
        self.settings, self.arch, self.sms = settings, arch, sms

    def __call__(self, qo_len: int, kv_len: int) -> SingleSchedule[Tile]:
        """Returns the schedule of a request with these lengths."""
        causal, window_left = self.settings.causal, self.settings.window_left
        rows, position = qo_len * self.group_size, kv_len - qo_len  # of query row 0
        chosen = prepared(tiling, self.settings, min(rows, MANY_ROWS), self.arch, self.sms)
        tile, params = chosen.tile, chosen.params
        ctas = -(-rows // tile.rows) * params.num_kv_heads
        tokens = (tile.rows - 1) // self.group_size + 2  # that one query tile can touch
        visible = visible_tokens(qo_len, kv_len, tokens, causal, window_left)
        kv_tiles, visible_tiles = ceil_div(kv_len, tile.cols), ceil_div(visible, tile.cols)
        num_splits, tiles_per_split = split_kv(
            kv_tiles, visible_tiles, ctas, params.resident_ctas, params.min_split_tiles
        )
        right = position if causal else UNBOUNDED
        left = position - window_left if 0 <= window_left < kv_len else -UNBOUNDED
        numbers = qo_len, kv_len, right, left, tiles_per_split
        return SingleSchedule(tile, self.group_size, num_splits, (ctas, 1, num_splits), numbers)
