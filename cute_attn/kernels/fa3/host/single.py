"""Schedules of single requests for the wgmma kernel: the order of tiles, and how the keys are split."""

from __future__ import annotations

from cute_attn.kernels.fa3.host import variant as fa3_variant
from cute_attn.kernels.fa3.host.prepared import order_values
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host.fastdiv import magic
from cute_attn.kernels.host.single import SingleSchedule
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule import split_kv as split_kv_rules


class Scheduler:
    """Schedules of requests with the same settings."""

    def __init__(self, settings: Settings, arch: Arch, sms: int) -> None:
        """Settles the tile; there is one `arch` that these kernels run on."""
        self.settings, self.features, self.sms = settings, settings.features, sms
        self.tile = fa3_variant.tile(self.features, settings.window_left >= 0)

    def __call__(self, qo_len: int, kv_len: int) -> SingleSchedule[HopperTile]:
        features, tile = self.features, self.tile
        heads = fa3_variant.heads_per_tile(features, qo_len, tile.rows)
        blocks, head_blocks = split_kv_rules.ceil_div(qo_len * heads, tile.rows), features.num_qo_heads // heads
        num_splits, tiles = self.split(qo_len, kv_len, heads, blocks * head_blocks)
        section = fa3_variant.section_heads(features, heads, kv_len)
        total = num_splits * blocks * head_blocks
        numbers = (
            *order_values(total, section * blocks, section),
            qo_len,
            kv_len,
            blocks - 1,
            tiles * tile.cols,
            *(blocks * head_blocks, *magic(blocks * head_blocks)),
        )
        return SingleSchedule(tile, heads, num_splits, (min(total, self.sms), 1, 1), numbers)

    def split(self, qo_len: int, kv_len: int, heads: int, query_tiles: int) -> split_kv_rules.Split:
        """How the keys are cut."""
        features, tile, settings = self.features, self.tile, self.settings
        kv_tiles = visible_tiles = split_kv_rules.ceil_div(kv_len, tile.cols)
        if settings.window_left >= 0:
            tokens = (tile.rows - 1) // heads + 2  # that one query tile can touch
            visible = split_kv_rules.visible_tokens(qo_len, kv_len, tokens, settings.causal, settings.window_left)
            visible_tiles = split_kv_rules.ceil_div(visible, tile.cols)
        least = split_kv_rules.min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo)
        return split_kv_rules.split_kv(kv_tiles, visible_tiles, query_tiles, self.sms, least)
