"""What the host decides of the schedule of a batch: how many records it may have, and whether keys may be split. The
planner kernel (`kernels/plan`) writes the records. Pure numpy, no device.

Lengths may reach 2^30 tokens, query tokens times the GQA group size 2^30 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_attn.errors import RuntimeArgumentError, WorkspaceError
from cute_attn.problem import BatchLengths, BatchLimits, LaunchSizes, largest, total
from cute_attn.schedule.constants import COMBINE_TIME, CUT_WORTHWHILE, ITEM_TIME, L2_ORDER_MIN_WAVES, UNIT
from cute_attn.schedule.params import Capacity, SchedulerParams
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

EXTRA_WAVES = 2  # waves of items that splits may add to a launch
MOST_PREFILL_KEYS = 2  # keys per query token of a batch that counts as prefill: a request has few tiles or few keys
LONG_KEYS = 16384  # of a request: cutting the last wave gains more than a combine launch without work costs
TIME_BITS = 11  # of the number of kv tiles of a query tile, where times of tiles are compared
MERGE_ROWS = 16384  # rows of a combine launch, unless one wave of items needs more


class Size(NamedTuple):
    """What of the lengths of a launch decides its tile."""

    qo_len: int  # query tokens of a typical request
    kv_len: int | None  # mean number of keys of a request
    # ^ None: a captured launch serves other lengths too, or results must not depend on lengths: those of fixed splits
    rows: int  # query tokens of all requests
    longest: int  # keys of the longest request of a batch, where its order considers them, else 0


def size_of(lengths: BatchLengths, limits: BatchLimits) -> Size:
    """Returns the size of a batch; where lengths are on the device, `kv_len` counts the tokens in k and v."""
    keys, requests, rows = lengths.total_kv, lengths.batch_size, lengths.rows - lengths.first_row
    # A blank item, which launches of a fixed size may have, ends a CTA's work: behind it must be no other section.
    longest = lengths.longest_kv
    if limits.sizes:
        keys, requests, rows, longest = limits.sizes.max_kv_tokens, limits.sizes.batch_size, limits.sizes.max_rows, 0
    any_lengths = limits.keeps_address or limits.fixed_split_size is not None or limits.disable_split_kv
    return Size(typical_qo_len(lengths, limits), None if any_lengths else ceil_div(keys, requests or 1), rows, longest)


def typical_qo_len(lengths: BatchLengths, limits: BatchLimits) -> int:
    """Returns the query tokens of a typical request, by which the tile is chosen.

    The number is the same for all plans of a captured launch.
    """
    rows, requests = lengths.rows - lengths.first_row, lengths.with_queries
    if limits.sizes:
        rows, requests = limits.sizes.max_rows, limits.sizes.batch_size
    return ceil_div(rows, requests) if requests else limits.max_qo_len or 0


def orders_by_l2(params: SchedulerParams, items: int, late: int) -> bool:
    """Tells whether items are ordered by L2 group before length: not in few waves, the last of which would end late;
    nor where so many query tiles have parts that come last, as the cost model wants them.
    """
    if late or not params.l2_kv_tokens:
        return False
    return items * params.num_kv_heads >= L2_ORDER_MIN_WAVES * params.resident_ctas


# ---- lengths on the host


def capacity_for(lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits) -> Capacity:
    """Returns how many records the schedule of these lengths may have: without splits, or with those of a fixed size,
    as many as it has.
    """
    chunk, partials = fixed_chunk(params, limits), limits.workspace_bytes // params.partial_bytes
    if chunk:
        fixed = _fixed_splits(*visible_kv_tiles(lengths, params), chunk, params, limits)
        return fixed if limits.sizes is None else record_capacity(params, limits)
    if limits.sizes is not None:
        return record_capacity(params, limits)
    tiles = total(_tiles_of_requests(lengths, params))
    short = lengths.longest_kv <= (2 * params.min_split_tiles - 1) * params.cols
    if short or limits.disable_split_kv or partials < 2 or not may_split(lengths, tiles, params):
        return Capacity(tiles, 0, 0)
    return _with_splits(tiles, params, partials)


def _tiles_of_requests(lengths: BatchLengths, params: SchedulerParams) -> np.ndarray:
    """Returns the number of query tiles of each request."""
    return -(lengths.qo_len * -params.group_size // params.rows)


def visible_kv_tiles(lengths: BatchLengths, params: SchedulerParams) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of kv tiles that some row of each query tile sees, of all requests in order.

    `kernels.blocks.masks.Band` computes the same bounds in a CTA, without the tiles that multi-item scoring hides.
    """
    group, rows, cols, kv_len = params.group_size, params.rows, params.cols, lengths.kv_len
    causal, visible = params.causal, kv_len - lengths.qo_len + 1  # to query token 0
    if lengths.longest_qo * group <= rows and lengths.with_queries == len(kv_len):
        first_row, causal = np.zeros(len(kv_len), np.int64), False  # one tile each, whose last token sees all keys
    else:
        tiles = _tiles_of_requests(lengths, params)
        request, rows_before = np.arange(len(kv_len)).repeat(tiles), (tiles.cumsum() - tiles) * rows
        first_row = np.arange(0, len(request) * rows, rows) - rows_before.take(request)
        kv_len, visible = kv_len.take(request), visible.take(request)
    stop = kv_len
    if causal:
        last = (first_row + (rows - 1)) // group  # the last token, if it exists
        stop = np.maximum(np.minimum(last + visible, kv_len), 0)
    begin = np.zeros(len(stop), np.int64)
    if params.window_left >= 0:
        begin = np.maximum(first_row // group + visible - (params.window_left + 1), 0) // cols
    return begin, (stop + (cols - 1)) // cols


def may_split(lengths: BatchLengths, tiles: int, params: SchedulerParams) -> bool:
    """Tells whether splits may pay, of so many query tiles: not where an equal share of the work, and a combine launch,
    take as long as whole tiles take the fullest CTA, or nearly. When `count` tiles take a time or longer, some CTA runs
    `ceil(count * num_kv_heads / resident_ctas)` of them.
    """
    (less, whole), heads, ctas = CUT_WORTHWHILE, params.num_kv_heads, params.resident_ctas
    longest = ceil_div(lengths.longest_kv, params.cols) * UNIT + ITEM_TIME  # as the planner kernel counts it
    if params.window_left < 0 and lengths.with_queries == lengths.batch_size:  # some tile sees so many keys
        share = tiles * longest * heads // ctas  # at most
        if (share + COMBINE_TIME) * whole <= longest * less:
            return True
    begin, end = visible_kv_tiles(lengths, params)
    visible = end - begin
    most = largest(visible) if len(visible) else 0
    if most < 2 * params.min_split_tiles:
        return False
    coarse = max(0, most.bit_length() - TIME_BITS)
    counts, step = np.bincount(visible >> coarse), UNIT << coarse
    time = np.arange(ITEM_TIME, ITEM_TIME + step * len(counts), step)
    waves = -(counts[::-1].cumsum()[::-1] * -heads // ctas)
    share = int(counts.dot(time)) * heads // ctas
    return (share + COMBINE_TIME) * whole <= largest(waves * time) * less


def fixed_chunk(params: SchedulerParams, limits: BatchLimits) -> int:
    """Returns the kv tiles of splits of a fixed size; 0: the cost model decides on splits, or there are none."""
    size = limits.fixed_split_size
    if size is None or limits.disable_split_kv:
        return 0
    if size < 1:
        raise RuntimeArgumentError(f"fixed_split_size must be at least 1 token, got {size}")
    return min(ceil_div(size, params.cols), 1 << 30)


def _fixed_splits(
    begin: np.ndarray, end: np.ndarray, chunk: int, params: SchedulerParams, limits: BatchLimits
) -> Capacity:
    """Returns the records of query tiles that are split at multiples of `chunk` kv tiles from token 0. Raises what
    hinders it.
    """
    splits = np.maximum(-(-end // chunk) - begin // chunk, 1)
    most, size, several = int(splits.max(initial=1)), limits.fixed_split_size, splits[splits > 1]
    if most > MAX_SPLITS:
        smallest_size = ceil_div(int(end.max()), MAX_SPLITS) * params.cols
        raise RuntimeArgumentError(
            f"fixed_split_size must split a request into at most {MAX_SPLITS} parts, got {size} tokens, which make "
            f"{most}; this batch needs at least {smallest_size}"
        )
    partials = int(several.sum())
    needed = partials * params.partial_bytes
    if needed > limits.workspace_bytes:
        raise WorkspaceError(
            f"float_workspace_buffer must have {needed} bytes for fixed_split_size={size} in this batch, "
            f"got {limits.workspace_bytes}"
        )
    return Capacity(int(splits.sum()), len(several), partials)


# ---- bounds of lengths: on the device, or of all plans of a captured launch


def record_capacity(params: SchedulerParams, limits: BatchLimits) -> Capacity:
    """Returns how many records the schedule of a batch within `limits.sizes` may have: every one fits."""
    assert limits.sizes is not None
    partials = limits.workspace_bytes // params.partial_bytes
    tiles = max_query_tiles(limits.sizes, params)
    kv_tiles, chunk = ceil_div(limits.sizes.max_kv_tokens, params.cols), fixed_chunk(params, limits)
    least = chunk + 1 if chunk else 2 * params.min_split_tiles  # kv tiles of a query tile that is split
    if limits.disable_split_kv or kv_tiles < least or partials < 2:
        return Capacity(tiles, 0, 0)
    if chunk:
        items = min(max_fixed_size_splits(limits.sizes, params, chunk), tiles + partials)
        return Capacity(items, min(tiles, items // 2, partials // 2), partials)
    if not limits.keeps_address and _fills_waves(params, limits.sizes):
        return Capacity(tiles, 0, 0)
    return _with_splits(tiles, params, partials)


def _with_splits(tiles: int, params: SchedulerParams, partials: int) -> Capacity:
    """Returns the capacity where the cost model may split some of so many query tiles."""
    wave = ceil_div(params.resident_ctas, params.num_kv_heads)
    merges = min(tiles, partials // 2, max(wave, MERGE_ROWS // (params.num_kv_heads * params.rows)))
    return Capacity(tiles + min(EXTRA_WAVES * wave, partials), merges, partials)


def _fills_waves(params: SchedulerParams, sizes: LaunchSizes) -> bool:
    """Tells whether a batch with lengths on the device is a prefill whose query tiles fill the GPU. The search
    splits none of 200 random ones, and a combine launch takes 1.3 us even without work (H200).
    """
    if not params.causal and sizes.max_kv_tokens >= LONG_KEYS * sizes.batch_size:
        return False  # equal tiles, whose last wave may be cut
    if sizes.max_kv_tokens > MOST_PREFILL_KEYS * sizes.max_rows:
        return False
    items = sizes.max_rows * params.group_size // params.rows * params.num_kv_heads
    return items * 2 >= 3 * params.resident_ctas


def max_query_tiles(sizes: LaunchSizes, params: SchedulerParams) -> int:
    """Returns the largest number of query tiles of any batch within the limits."""
    requests = min(sizes.batch_size, sizes.max_rows)
    if params.group_size >= params.rows:
        tiles = sizes.max_rows * ceil_div(params.group_size, params.rows)
    else:  # each tile after a request's first takes this many more tokens
        tiles = requests + (sizes.max_rows - requests) // (params.rows // params.group_size)
    if sizes.max_qo_len is None:
        return tiles
    return min(tiles, requests * ceil_div(sizes.max_qo_len * params.group_size, params.rows))


def max_fixed_size_splits(sizes: LaunchSizes, params: SchedulerParams, chunk: int) -> int:
    """Returns the largest number of items of any batch within the limits, split at multiples of `chunk` kv tiles."""
    kv_tiles = ceil_div(sizes.max_kv_tokens, params.cols)
    requests = min(sizes.batch_size, sizes.max_rows)
    bound = max_query_tiles(sizes, params) * min(MAX_SPLITS, ceil_div(kv_tiles, chunk))  # as if every tile saw all keys
    if sizes.max_qo_len is None:
        return bound
    tiles_per_request = ceil_div(sizes.max_qo_len * params.group_size, params.rows)
    return min(bound, tiles_per_request * (requests + sizes.max_kv_tokens // (chunk * params.cols)))
