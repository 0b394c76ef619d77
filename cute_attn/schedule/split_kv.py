"""Split-KV of a single request: pure functions of lengths, no tensors and no device."""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.schedule.records import MAX_SPLITS

# Estimates in kv tiles, not tuned on hardware.
MIN_TILES = 2  # a split of one tile spends its time on starting
MIN_SAVED_TILES = 4  # cost of the combine launch


class Split(NamedTuple):
    """Split s covers the kv tiles of [s, s + 1) * tiles_per_split that exist; every split has at least one."""

    num_splits: int
    tiles_per_split: int


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return -(-a // b)


def visible_tokens(qo_len: int, kv_len: int, tile_tokens: int, causal: bool, window_left: int) -> int:
    """Returns the kv tokens that the busiest query tile of `tile_tokens` tokens sees: one CTA reads them if unsplit."""
    if window_left < 0:
        return kv_len  # under a causal mask this is the last tile
    if causal:
        return min(kv_len, min(tile_tokens, qo_len) + window_left)
    return kv_len - min(kv_len, max(0, kv_len - qo_len - window_left))  # the first tile: the right side is open


def min_split_tiles(tile_rows: int, tile_cols: int, head_dim_qk: int, head_dim_vo: int) -> int:
    """Returns the kv tiles of the smallest split worth its traffic: they have as many bytes as its fp32 partial costs,
    written and read.
    """
    partial = 2 * 4 * tile_rows * head_dim_vo
    kv_tile = 2 * tile_cols * (head_dim_qk + head_dim_vo)
    return max(MIN_TILES, ceil_div(partial, kv_tile))


def split_kv(kv_tiles: int, visible_tiles: int, ctas: int, resident_ctas: int, min_tiles: int) -> Split:
    """Splits `kv_tiles` so that `ctas` CTAs, each reading at most `visible_tiles`, become one full wave.

    `resident_ctas` is the number of CTAs that the device runs at once. Tiles that a causal mask or a window hides cost
    nothing, so only the visible ones decide the size; the splits themselves cover all tiles, since the visible ones
    may lie anywhere.
    """
    wanted = min(resident_ctas // ctas, MAX_SPLITS)
    if wanted < 2:
        return Split(1, max(1, kv_tiles))
    tiles_per_split = max(min_tiles, -(-visible_tiles // wanted), -(-kv_tiles // MAX_SPLITS))
    if visible_tiles - tiles_per_split < MIN_SAVED_TILES:
        return Split(1, max(1, kv_tiles))
    return Split(ceil_div(kv_tiles, tiles_per_split), tiles_per_split)
