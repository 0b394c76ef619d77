"""Schedules of batches for the wgmma kernel."""

from __future__ import annotations

import functools

from cute_attn.kernels.fa3.host import variant as fa3_variant
from cute_attn.kernels.fa3.host.prepared import order_values
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host.batch import BatchSchedule
from cute_attn.kernels.host.params import Values
from cute_attn.problem import BatchLengths, BatchLimits, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule import split_kv as split_kv_rules
from cute_attn.schedule.batch import TileShape, Work


def schedule(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: batch_schedule.Memory = batch_schedule.new_ints,
) -> BatchSchedule[HopperTile]:
    """The schedule of a batch on a GPU with `sms` multiprocessors; there is one `arch` that these kernels run on."""
    tokens = batch_schedule.rows_of_a_request(lengths, limits)
    longest = 0 if limits.graph else int(lengths.kv_len.max(initial=0))  # captured: the number of items may change
    kv_len = 1 << (longest - 1).bit_length() if longest else 0
    tile_and_shape = tiling(settings, min(tokens, fa3_variant.PACKED_TOKENS), kv_len, sms)
    return host_batch.schedule(tile_and_shape, lengths, limits, memory, sms, max_ctas=sms, numbers=order_of)


@functools.lru_cache(host_batch.MAX_SETTINGS)
def tiling(settings: Settings, qo_len: int, kv_len: int, sms: int) -> tuple[HopperTile, TileShape]:
    """The tile for requests of `qo_len` tokens and up to `kv_len` keys, and what the schedule must know of it. Heads
    that share a tile count as one group.
    """
    features = settings.features
    tile = fa3_variant.tile(features, settings.window_left >= 0, settings.page_size)
    heads = fa3_variant.heads_per_tile(features, qo_len, tile.rows)
    section = fa3_variant.section_heads(features, heads, kv_len)
    kv_heads = max(1, section * heads * features.num_kv_heads // features.num_qo_heads)
    return tile, TileShape(
        tile.rows,
        tile.cols,
        heads,
        features.num_qo_heads // heads,
        settings.causal,
        settings.window_left,
        sms,
        split_kv_rules.min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo),
        4 * (features.head_dim_vo + 1),
        section,
        fa3_variant.SECTION_BYTES // (kv_heads * fa3_variant.token_bytes(features)),
    )


def sections(shape: TileShape, work: Work) -> tuple[int, int]:
    """Tiles of an L2 section, and blocks of heads in it."""
    items = work.item_capacity
    heads = shape.section_heads if batch_schedule.grouped(shape, items) else shape.num_kv_heads
    return max(1, items) * heads, heads


def order_of(shape: TileShape, work: Work) -> Values:
    """Values of the kernel's ORDER_FIELDS."""
    return order_values(work.item_capacity * shape.num_kv_heads, *sections(shape, work))
