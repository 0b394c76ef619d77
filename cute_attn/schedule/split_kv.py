"""Host-side schedules: pure functions of lengths, no tensors and no device."""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.schedule.records import MAX_SPLITS

# Estimates, not tuned on hardware: what a split of one tile spends on starting, and what the combine launch costs.
MIN_TILES = 2
SAVED_TILES = 4


class Split(NamedTuple):
    """Split s covers those kv tiles of [s, s + 1) * tiles_per_split that exist; each has one at least."""

    num_splits: int
    tiles_per_split: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def visible_tokens(qo_len: int, kv_len: int, tile_tokens: int, causal: bool, window_left: int) -> int:
    """kv tokens that the busiest query tile of `tile_tokens` tokens sees, which one unsplit CTA reads."""
    if window_left < 0:
        return kv_len  # under a causal mask this is the last tile
    if causal:
        return min(kv_len, min(tile_tokens, qo_len) + window_left)
    return kv_len - min(kv_len, max(0, kv_len - qo_len - window_left))  # the first tile: the right side is open


def min_split_tiles(tile_rows: int, tile_cols: int, head_dim_qk: int, head_dim_vo: int) -> int:
    """Smallest split worth its traffic: K and V of as many bytes as its fp32 partial, written and read."""
    partial = 2 * 4 * tile_rows * head_dim_vo
    kv_tile = 2 * tile_cols * (head_dim_qk + head_dim_vo)
    return max(MIN_TILES, ceil_div(partial, kv_tile))


def split_kv(kv_tiles: int, visible_tiles: int, ctas: int, slots: int, min_tiles: int) -> Split:
    """How to cut `kv_tiles` so that `ctas` CTAs, each reading at most `visible_tiles`, become one full wave.

    `slots` is how many CTAs the device holds at once. Tiles that a causal mask or a window hides cost
    nothing, so that only the visible ones decide; the cut itself runs over all of them, visible tiles being
    anywhere.
    """
    wanted = min(slots // ctas, MAX_SPLITS)
    if wanted < 2:
        return Split(1, max(1, kv_tiles))
    tiles_per_split = max(min_tiles, -(-visible_tiles // wanted), -(-kv_tiles // MAX_SPLITS))
    if visible_tiles - tiles_per_split < SAVED_TILES:
        return Split(1, max(1, kv_tiles))
    return Split(ceil_div(kv_tiles, tiles_per_split), tiles_per_split)
