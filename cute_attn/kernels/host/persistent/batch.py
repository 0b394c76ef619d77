"""Tiles for persistent kernels, of batches and of single requests, and the order in which a launch takes them."""

from __future__ import annotations

import functools

from cute_attn.kernels.blocks.tiles import Launch, tile_rows
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.params import magic
from cute_attn.kernels.host.persistent import variant
from cute_attn.kernels.host.persistent.prepared import PersistentKernel, order_values
from cute_attn.kernels.host.prepared import Grid, prepared
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Values
from cute_attn.schedule.batch import Size, orders_by_l2
from cute_attn.schedule.cuts import SchedulerParams
from cute_attn.schedule.split_kv import Split, ceil_div, min_split_tiles


def tiling(
    kernels: variant.PersistentKernels[variant.T], settings: Settings, size: Size, arch: Arch, sms: int
) -> Tiling[variant.T]:
    """Returns the tiling of a launch on a GPU with `sms` multiprocessors: few tilings serve all lengths."""
    launch, features = variant.UNKNOWN_LAUNCH, settings.features
    if size.kv_len is not None:
        launch = variant.launch_of(size.rows * features.num_qo_heads, sms, size.qo_len, size.kv_len)
    tile = prepared(kernels.tile, settings, arch.name, launch)
    section = 1 << (size.longest - 1).bit_length() if size.longest else 0
    return prepared(
        _of_tile, kernels, settings, tile, kernels.heads_per_tile(features, size.qo_len, tile), section, sms, launch
    )


def request_launch(
    settings: Settings, tiling: Tiling[variant.T], split: Split, qo_len: int, kv_len: int
) -> tuple[Grid, Values]:
    """Returns the grid of a single request, and the values of ORDER_FIELDS and LENGTH_FIELDS."""
    heads, tile = tiling.params.group_size, tiling.tile
    blocks = ceil_div(qo_len * heads, tiling.params.rows)
    query_tiles = blocks * tiling.params.num_kv_heads
    total, section = split.num_splits * query_tiles, variant.section_heads(settings.features, heads, kv_len)
    order = order_values(total, section * blocks, section)
    lengths = qo_len, kv_len, blocks - 1, split.tiles_per_split * tile.cols, query_tiles, *magic(query_tiles)
    return (tile.ctas * min(total, tiling.params.resident_ctas), 1, 1), order + lengths


def _of_tile(
    kernels: variant.PersistentKernels[variant.T],
    settings: Settings,
    tile: variant.T,
    heads: int,
    kv_len: int,
    sms: int,
    launch: Launch,
) -> Tiling[variant.T]:
    """Returns the tiling for a launch with requests of up to `kv_len` keys. To the scheduler, `heads` that share a tile
    are one group.
    """
    features = settings.features
    section = variant.section_heads(features, heads, kv_len, launch)
    kv_heads = max(1, section * heads * features.num_kv_heads // features.num_qo_heads)
    groups = max(1, sms * tile.per_sm // tile.ctas)  # of CTAs that share work items
    params = SchedulerParams(
        rows=tile_rows(tile.rows, heads),
        cols=tile.cols,
        group_size=heads,
        num_kv_heads=features.num_qo_heads // heads,
        causal=settings.causal,
        window_left=settings.window_left,
        resident_ctas=groups,
        min_split_tiles=min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo),
        partial_row_bytes=4 * (features.head_dim_vo + 1),
        l2_section_heads=section,
        l2_kv_tokens=variant.section_tokens(features, launch) // kv_heads,
    )
    return Tiling(tile, params, persistent_groups=groups, ctas=tile.ctas, order=batch_order)


def batch_order(params: SchedulerParams, items: int, late: int) -> Values:
    """Returns the values of the kernel's ORDER_FIELDS for a launch of so many work items. `late`: query tiles whose
    parts come last.
    """
    heads = params.l2_section_heads if orders_by_l2(params, items, late) else params.num_kv_heads
    return order_values(items * params.num_kv_heads, max(1, items) * heads, heads)


def family(kernels: variant.PersistentKernels[variant.T]) -> TiledFamily[variant.T]:
    """Returns the family of these kernels."""
    return TiledFamily(
        kernels.name,
        kernels.specs,
        kernels.spec,
        functools.partial(tiling, kernels),
        request_launch,
        functools.partial(PersistentKernel, kernels),
    )
