"""Schedules of single requests for persistent kernels: the order of tiles, and the split of the keys."""

from __future__ import annotations

from typing import Generic

from cute_attn.kernels.blocks.tiles import Launch
from cute_attn.kernels.host.fastdiv import magic
from cute_attn.kernels.host.persistent import variant
from cute_attn.kernels.host.persistent.prepared import order_values
from cute_attn.kernels.host.single import SingleSchedule
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.split_kv import Split, ceil_div, min_split_tiles, split_kv, visible_tokens


class Scheduler(Generic[variant.T]):
    """Schedules requests with the same settings."""

    def __init__(self, kernels: variant.PersistentKernels[variant.T], settings: Settings, arch: Arch, sms: int) -> None:
        self.kernels, self.settings, self.features = kernels, settings, settings.features
        self.arch, self.sms = arch.name, sms
        self.tiles: dict[Launch, variant.T] = {}

    def __call__(self, qo_len: int, kv_len: int) -> SingleSchedule[variant.T]:
        """Returns the schedule of a request with these lengths."""
        features = self.features
        launch = variant.launch_of(qo_len * features.num_qo_heads, self.sms, qo_len, kv_len)
        tile = self.tiles.get(launch)
        if tile is None:
            tile = self.tiles[launch] = self.kernels.tile_of(self.settings, self.arch, launch)
        groups = max(1, self.sms * tile.per_sm // tile.ctas)  # of CTAs that share work items
        heads = self.kernels.heads_per_tile(self.settings, qo_len, tile.q_box_rows)
        blocks, head_blocks = ceil_div(qo_len * heads, tile.rows), features.num_qo_heads // heads
        num_splits, tiles = self.split(tile, (qo_len, kv_len), heads, blocks * head_blocks, groups)
        section = variant.section_heads(features, heads, kv_len)
        total = num_splits * blocks * head_blocks
        numbers = (
            *order_values(total, section * blocks, section),
            qo_len,
            kv_len,
            blocks - 1,
            tiles * tile.cols,
            *(blocks * head_blocks, *magic(blocks * head_blocks)),
        )
        return SingleSchedule(tile, heads, num_splits, (tile.ctas * min(total, groups), 1, 1), numbers)

    def split(self, tile: variant.T, lengths: tuple[int, int], heads: int, query_tiles: int, groups: int) -> Split:
        """Returns the split of the keys. `groups`: of CTAs that run at a time."""
        features, settings, (qo_len, kv_len) = self.features, self.settings, lengths
        tokens = (tile.rows - 1) // heads + 2  # that one query tile can touch
        visible = visible_tokens(qo_len, kv_len, tokens, settings.causal, settings.window_left)
        kv_tiles, visible_tiles = ceil_div(kv_len, tile.cols), ceil_div(visible, tile.cols)
        least = min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo)
        return split_kv(kv_tiles, visible_tiles, query_tiles, groups, least)
