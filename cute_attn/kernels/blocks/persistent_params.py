"""What persistent kernels are told at launch: parameters and tensor maps."""

import typing
from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks.rows import Divisor


class PersistentParams(NamedTuple):
    """Kernel parameters after the tensor maps, in order. Addresses are Int64, 0 where absent; strides are bytes."""

    o: Int64
    lse: Int64
    k_address: Int64
    v_address: Int64
    mask: Int64
    mask_bytes: Int64
    scale0: Int64
    scale1: Int64
    v_scale_ptr: Int64
    sinks: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    counters: Int64
    right: Int32
    left: Int32
    full_tiles: Int32  # -1; 0: all kv tiles count as masked
    total_tiles: Int32
    num_qo_heads: Int32
    group: Divisor  # heads that share a tile's rows
    tile_rows: Int32  # packed rows of a query tile: whole tokens of the heads that share it
    kv_group: Divisor  # blocks of such heads per kv head
    scale: Float32
    soft_cap: Float32
    v_scale: Float32
    lse_scale: Float32
    section_tiles: Divisor
    section_heads: Divisor
    # schedule "grid"
    qo_len: Int32
    kv_len: Int32
    last_block: Int32
    split_tokens: Int32
    split_tiles: Divisor
    # schedule "items"
    items: Int64
    o_partial: Int64
    lse_partial: Int64
    head_blocks: Int32
    # all kv but "dense"
    page_size: Divisor
    box_rows: Int32
    kv_indices: Int64
    # kv "gathered": bytes from a page, a token and a head to the next
    k_page_stride: Int64
    k_stride_n: Int64
    k_stride_h: Int64
    v_page_stride: Int64
    v_stride_n: Int64
    v_stride_h: Int64
    # fp8: fp32 per head
    scale_q: Int64
    scale_k: Int64
    scale_v: Int64


AnyParams = Any  # `PersistentParams` or `extended` ones: the DSL compares annotations of traced functions exactly


class Maps(NamedTuple):
    """Generic addresses of the tensor maps: q [line, heads of a tile, tokens, blocks of heads], k and v [line, tokens,
    kv heads, pages].
    """

    q: Int64
    k: Int64
    v: Int64


class OutputMaps(NamedTuple):
    """The same, and o [line, heads of a tile, tokens, blocks of heads], for kernels that store outputs by TMA."""

    q: Int64
    k: Int64
    v: Int64
    o_map: Int64


def extended(name: str, fields: dict[str, type]) -> Any:
    """Returns the NamedTuple class of these parameters and, behind them, `fields`: name to scalar type."""
    return NamedTuple(name, [*typing.get_type_hints(PersistentParams).items(), *fields.items()])  # type: ignore[misc]
