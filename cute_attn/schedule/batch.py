"""Static schedule of a batch: a list of work items, each one query tile against a range of keys. Pure numpy, no device.

    query tiles   `rows` packed rows of one request each, and the kv tiles that a band mask lets them see
    splits        their kv tiles, split where that shortens the launch (cost_model) or at fixed positions
    records       longest split first, grouped by requests that share L2; a merge record per query tile with splits

Lengths may reach 2^30 tokens, query tokens times the GQA group size 2^30 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cute_attn.errors import RuntimeArgumentError, WorkspaceError
from cute_attn.problem import UNLIMITED, BatchLengths, BatchLimits, GraphLimits, largest, smallest
from cute_attn.schedule import cost_model, few_tiles
from cute_attn.schedule.constants import L2_ORDER_MIN_WAVES, SORT_BINS
from cute_attn.schedule.cost_model import Capacity
from cute_attn.schedule.last_wave import last_wave
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

AllocateInts = Callable[[int], np.ndarray]  # allocates a flat int32 array of the given size

EXTRA_WAVES = 2  # waves of items that splits may add to a launch of fixed size
MOST_PREFILL_KEYS = 2  # keys per query token of a batch that counts as prefill: a request has few tiles or few keys
MERGE_ROWS = 16384  # rows of a combine launch of fixed size, unless one wave of items needs more

_QO_START, _QO_LEN, _KV_START, _KV_LEN, _FIRST_ROW, _KV_BEGIN, _KV_END, _PARTIAL, _MASK_LOW, _MASK_HIGH, _REQUEST = (
    range(len(Item._fields))
)
_NONE = np.empty(0, np.int64)


class _SchedulerParams(NamedTuple):
    rows: int
    cols: int
    group_size: int  # num_qo_heads / num_kv_heads
    num_kv_heads: int
    causal: bool
    window_left: int  # negative: none
    resident_ctas: int  # CTAs that the device runs at once
    min_split_tiles: int  # kv tiles of the smallest split worth its partial: split_kv.min_split_tiles
    partial_row_bytes: int  # 4 * (head_dim_vo + 1)
    l2_section_heads: int = 0  # kv heads processed side by side before the next ones begin; 0: all
    l2_kv_tokens: int = 0  # kv tokens of so many heads that L2 holds; 0: the order of requests does not matter
    cuts_last_wave: bool = False  # whether the last items of a launch of equal ones may be cut


class SchedulerParams(_SchedulerParams):
    """Tile of a launch, the mask that all requests share, and properties of the device. What every schedule needs of
    them is computed once.
    """

    @functools.cached_property
    def cost_device(self) -> cost_model.Device:
        """Device of the cost model."""
        return cost_model.Device.of(self.resident_ctas, self.num_kv_heads, self.min_split_tiles, self.rows, self.cols)

    @functools.cached_property
    def partial_bytes(self) -> int:
        """Workspace bytes of one partial: o and lse of a query tile, for every kv head."""
        return self.num_kv_heads * self.rows * self.partial_row_bytes


class WorkList(NamedTuple):
    """Work list of a launch. `ints` is copied to the device: all items, padded with zero records to `item_capacity`,
    then all merges, padded with zero records to `merge_capacity`, then the key bounds of multi-item scoring.
    """

    num_partials: int  # that items write to the workspace
    item_capacity: int
    merge_capacity: int
    ints: np.ndarray  # [item_capacity * ITEM_INTS + merge_capacity * MERGE_INTS + size of the key bounds] int32
    key_bounds: int | None = None  # index in `ints` of `BatchLengths.key_bounds`, if the batch has them

    @property
    def items(self) -> np.ndarray:
        """View of the items: int32 `[item_capacity, ITEM_INTS]`."""
        return self.ints[: self.item_capacity * ITEM_INTS].reshape(-1, ITEM_INTS)

    @property
    def merges(self) -> np.ndarray:
        """View of the merges: int32 `[merge_capacity, MERGE_INTS]`."""
        start = self.item_capacity * ITEM_INTS
        return self.ints[start : start + self.merge_capacity * MERGE_INTS].reshape(-1, MERGE_INTS)


class Gap(NamedTuple):
    """Kv tiles [begin, end) of every query tile that are hidden by multi-item scoring."""

    begin: np.ndarray
    end: np.ndarray

    def within(self, begin: np.ndarray, end: np.ndarray, tile: np.ndarray | None) -> np.ndarray:
        """Returns the number of hidden tiles in [begin, end) of the query tiles `tile` (None: all)."""
        first, last = self if tile is None else (self.begin[tile], self.end[tile])
        return np.maximum(np.minimum(last, end) - np.maximum(first, begin), 0)


class QueryTiles(NamedTuple):
    """One entry per query tile that has rows, in the order of requests."""

    request: np.ndarray | None  # intp: numpy indexes with it; None: every request has one tile
    first_row: np.ndarray
    begin: np.ndarray  # kv tiles [begin, end) are visible; both are 0 where none is; begin is 0 without a window
    end: np.ndarray
    gap: Gap | None = None  # tiles between that are hidden

    def requests_of(self, tile: np.ndarray) -> np.ndarray:
        """Returns the requests of query tiles."""
        return tile if self.request is None else self.request.take(tile)


class Splits(NamedTuple):
    """Kv tiles of every work item, in the order of query tiles, and the query tiles that need a merge."""

    tile: np.ndarray | None  # query tile of the item; None: every query tile has one item
    begin: np.ndarray
    end: np.ndarray
    partial: np.ndarray | None  # index of the item's partial, or NO_PARTIAL; None: no item has one
    merge_tile: np.ndarray  # query tiles with several splits
    first_partial: np.ndarray  # index of the first partial of each `merge_tile`
    num_splits: np.ndarray  # number of splits of each `merge_tile`


def allocate_ints(size: int) -> np.ndarray:
    """Allocates pageable host memory for the records of a schedule."""
    return np.empty(size, np.int32)


def schedule(
    lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits, allocate: AllocateInts = allocate_ints
) -> WorkList:
    """Returns the work list of a batch, written into memory from `allocate`.

    Splits are added only as far as the workspace and, for CUDA graphs, the record capacities allow.
    `fixed_split_size` is applied exactly instead: if the workspace is too small for that, a WorkspaceError names the
    bytes needed.
    """
    capacity = record_capacity(params, limits)
    few = few_tiles.covers(lengths, params) and not params.cuts_last_wave
    if few and (limits.fixed_split_size is None or limits.disable_split_kv):
        return _few_tiles(lengths, params, capacity, limits.graph is not None, allocate)
    tiles = query_tiles(lengths, params)
    if limits.fixed_split_size is not None and not limits.disable_split_kv:
        splits = _fixed_size_splits(tiles, params, limits)
    else:
        splits = _balanced_splits(tiles, params, capacity)
    order = _item_order(lengths, params, tiles, splits)
    bounds = _key_bounds(lengths, params, limits)
    return _work(lengths, params, tiles, splits, order, capacity if limits.graph else None, bounds, allocate)


def _few_tiles(
    lengths: BatchLengths, params: SchedulerParams, capacity: Capacity, padded: bool, allocate: AllocateInts
) -> WorkList:
    """Returns the work list of a batch of few query tiles, `padded` to the capacity or not."""
    found, merges, num_partials = few_tiles.items(lengths, params, capacity)
    ordered, num_items = few_tiles.longest_first(found), len(found)
    if orders_by_l2(params, num_items, len(merges)) and lengths.total_kv > params.l2_kv_tokens:
        groups = l2_groups(lengths, params).tolist()
        ordered.sort(key=lambda item: groups[item[1][-1]])
    item_capacity, merge_capacity = num_items, len(merges) // len(Merge._fields)
    if padded:
        item_capacity, merge_capacity, _ = capacity
    ints = allocate(item_capacity * ITEM_INTS + merge_capacity * MERGE_INTS)
    if padded:
        ints[:] = 0
    few_tiles.write(ordered, merges, ints, item_capacity)
    return WorkList(num_partials, item_capacity, merge_capacity, ints)


def _key_bounds(lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits) -> np.ndarray | None:
    """Returns the key bounds of all rows, flat, then zeros for rows of the last tile that do not exist; for a captured
    launch zeros for all rows that it has room for. None: no bounds.
    """
    if lengths.key_bounds is None:
        return None
    rows = len(lengths.key_bounds) if limits.graph is None else limits.graph.max_rows
    return np.pad(lengths.key_bounds.ravel(), (0, 2 * (rows - len(lengths.key_bounds) + params.rows)))


def query_tiles(lengths: BatchLengths, params: SchedulerParams) -> QueryTiles:
    """Returns the query tiles of all requests, each with the kv tiles that it sees."""
    qo_len, group = lengths.qo_len, params.group_size
    if lengths.longest_qo * group <= params.rows and lengths.with_queries == len(qo_len):
        return _one_tile_each(lengths, params, qo_len)
    tiles = (qo_len * group + (params.rows - 1)) // params.rows
    qo_len, kv_len = qo_len.astype(np.int32), lengths.kv_len.astype(np.int32)
    ends = tiles.cumsum()
    first_row = np.arange(ends.item(-1) if len(ends) else 0, dtype=np.int32)
    first_row -= (ends - tiles).astype(np.int32).repeat(tiles)  # several times faster than indexing
    first_row *= np.int32(params.rows)
    begin, end = _visible_kv_tiles(first_row, tiles, qo_len, kv_len, params)
    request = np.arange(len(tiles)).repeat(tiles)
    return QueryTiles(request, first_row, begin, end, _gap(lengths, params, request, first_row))


def _one_tile_each(lengths: BatchLengths, params: SchedulerParams, qo_len: np.ndarray) -> QueryTiles:
    """Returns the query tiles of a batch of which every request has one. Its last token sees all keys."""
    begin = first_row = np.zeros(len(qo_len), np.int64)
    if params.window_left >= 0:
        begin = np.maximum(lengths.kv_len - qo_len - params.window_left, 0) // params.cols
    end = -(-lengths.kv_len // params.cols)
    gap = None if lengths.key_bounds is None else _gap(lengths, params, np.arange(len(qo_len)), first_row)
    return QueryTiles(None, first_row, begin, end, gap)


def _gap(lengths: BatchLengths, params: SchedulerParams, request: np.ndarray, first_row: np.ndarray) -> Gap | None:
    """Returns the tiles that `kernels.blocks.multi_item.KeyBounds` leaves out in a CTA."""
    if lengths.key_bounds is None:
        return None
    prefix_end, item_start = lengths.key_bounds[lengths.qo_indptr[request] + first_row // params.group_size].T
    begin = -(-prefix_end // params.cols)
    return Gap(begin, np.maximum(item_start // params.cols, begin))


def _visible_kv_tiles(
    first_row: np.ndarray, tiles: np.ndarray, qo_len: np.ndarray, kv_len: np.ndarray, params: SchedulerParams
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of kv tiles that some row of each query tile sees; request i has `tiles[i]` query tiles.

    Query token i has position i + kv_len - qo_len; `kernels.blocks.masks.Band` computes the same bounds in a CTA.
    """
    group, cols = np.int32(params.group_size), np.int32(params.cols)
    if params.causal:
        stop = (first_row + np.int32(params.rows - 1)) // group  # the last token, if it exists
        stop += (kv_len - qo_len + np.int32(1)).repeat(tiles)
        np.minimum(stop, kv_len.repeat(tiles), out=stop)
        np.maximum(stop, np.int32(0), out=stop)
        end = (stop + (cols - np.int32(1))) // cols
    else:
        end = ((kv_len + (cols - np.int32(1))) // cols).repeat(tiles)
    if params.window_left < 0:
        return np.zeros(len(end), np.int32), end
    position = kv_len - qo_len - np.int32(min(params.window_left, 1 << 30))
    return np.maximum(first_row // group + position.repeat(tiles), np.int32(0)) // cols, end


def _balanced_splits(tiles: QueryTiles, params: SchedulerParams, capacity: Capacity) -> Splits:
    """Splits the longest query tiles evenly where the cost model expects a shorter launch."""
    visible = tiles.end if params.window_left < 0 else tiles.end - tiles.begin
    if tiles.gap is not None:
        visible = visible - tiles.gap.within(tiles.begin, tiles.end, None)
    num_splits = cost_model.num_splits(visible, params.cost_device, capacity)
    if num_splits is None:
        return _last_wave_splits(tiles, params, capacity) if params.cuts_last_wave else _unsplit(tiles)
    if smallest(num_splits) == 0:  # a tile that sees no keys is one item too
        num_splits = np.maximum(num_splits, 1)
    tile, index, partial, *merges = _enumerate(num_splits)
    end = visible.take(tile)
    begin = index * end // num_splits.take(tile)  # of the tiles that are visible, as long as `end` is their number
    end[:-1] = np.where(index[1:], begin[1:], end[:-1])  # where the next split of the tile begins
    if params.window_left >= 0:
        first = tiles.begin.take(tile)
        begin, end = begin + first, end + first
    if tiles.gap is not None:  # both count visible tiles
        first = tiles.begin.take(tile)
        gap_begin, gap_end = np.maximum(tiles.gap.begin[tile], first), tiles.gap.end[tile]
        hidden = np.maximum(gap_end - gap_begin, 0)
        begin, end = begin + hidden * (begin >= gap_begin), end + hidden * (end > gap_begin)
    return Splits(tile, begin, end, partial, *merges)


def _last_wave_splits(tiles: QueryTiles, params: SchedulerParams, capacity: Capacity) -> Splits:
    """Cuts the last query tiles where all see the same number of kv tiles, from 0 on, and that pays."""
    num_tiles = len(tiles.end)
    if not num_tiles or params.window_left >= 0 or tiles.gap is not None:
        return _unsplit(tiles)
    end = smallest(tiles.end)
    cut = last_wave(num_tiles, end, params.cost_device, capacity) if end == largest(tiles.end) else None
    if cut is None:
        return _unsplit(tiles)
    num_splits = np.ones(num_tiles, np.int64)
    num_splits[-cut.items :] = cut.long_parts + 1
    tile, index, partial, *merges = _enumerate(num_splits)
    is_cut = num_splits.take(tile) > 1
    begin = index * cut.kv_tiles
    return Splits(tile, begin, np.where(is_cut, np.minimum(begin + cut.kv_tiles, end), end), partial, *merges)


def _fixed_size_splits(tiles: QueryTiles, params: SchedulerParams, limits: BatchLimits) -> Splits:
    """Splits at multiples of `fixed_split_size` from token 0, regardless of what a tile sees or other requests need."""
    size = limits.fixed_split_size
    assert size is not None
    if size < 1:
        raise RuntimeArgumentError(f"fixed_split_size must be at least 1 token, got {size}")
    chunk = min(ceil_div(size, params.cols), 1 << 30)
    first = tiles.begin // chunk
    num_splits = np.maximum(-(-tiles.end // chunk) - first, 1)
    most_splits = int(num_splits.max(initial=1))
    if most_splits == 1:
        return _unsplit(tiles)
    if most_splits > MAX_SPLITS:
        smallest_size = ceil_div(int(tiles.end.max()), MAX_SPLITS) * params.cols
        raise RuntimeArgumentError(
            f"fixed_split_size must split a request into at most {MAX_SPLITS} parts, got {size} tokens, which make "
            f"{most_splits}; this batch needs at least {smallest_size}"
        )
    needed = int(num_splits[num_splits > 1].sum()) * params.partial_bytes
    if needed > limits.workspace_bytes:
        raise WorkspaceError(
            f"float_workspace_buffer must have {needed} bytes for fixed_split_size={size} in this batch, "
            f"got {limits.workspace_bytes}"
        )
    tile, index, partial, *merges = _enumerate(num_splits)
    start = (first[tile] + index) * chunk
    begin, end = np.maximum(start, tiles.begin[tile]), np.minimum(start + chunk, tiles.end[tile])
    return Splits(tile, begin, end, partial, *merges)


def _unsplit(tiles: QueryTiles) -> Splits:
    return Splits(None, tiles.begin, tiles.end, None, _NONE, _NONE, _NONE)


def _enumerate(num_splits: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns query tile, index within it and partial of every split; then the query tiles with several splits, their
    first partials and their numbers of splits.
    """
    tiles = np.arange(len(num_splits))
    tile, start = tiles.repeat(num_splits), num_splits.cumsum() - num_splits
    every = np.arange(len(tile))
    index = every - start.take(tile)
    if smallest(num_splits) > 1:
        return tile, index, every, tiles, start, num_splits
    several = num_splits > 1
    partials = num_splits * several
    first_partial = partials.cumsum() - partials
    partial = np.where(several.take(tile), first_partial.take(tile) + index, NO_PARTIAL)
    merge_tile = several.nonzero()[0]
    return tile, index, partial, merge_tile, first_partial.take(merge_tile), num_splits.take(merge_tile)


def _item_order(lengths: BatchLengths, params: SchedulerParams, tiles: QueryTiles, splits: Splits) -> np.ndarray:
    """Returns the order of items: longest first, within groups of requests that share L2 where these matter."""
    cost = splits.end if splits.tile is None and params.window_left < 0 else splits.end - splits.begin
    if tiles.gap is not None:
        cost = cost - tiles.gap.within(splits.begin, splits.end, splits.tile)
    order = longest_first(cost)
    if orders_by_l2(params, len(order), len(splits.merge_tile)) and lengths.total_kv > params.l2_kv_tokens:
        request = tiles.requests_of(order if splits.tile is None else splits.tile.take(order))
        order = order.take(l2_groups(lengths, params).take(request).argsort(kind="stable"))
    return order


def _work(
    lengths: BatchLengths,
    params: SchedulerParams,
    tiles: QueryTiles,
    splits: Splits,
    order: np.ndarray,
    capacity: Capacity | None,
    key_bounds: np.ndarray | None,
    allocate: AllocateInts,
) -> WorkList:
    """Returns the records in `order`, padded to `capacity` if that is given, and the key bounds."""
    num_items, num_merges = len(order), len(splits.merge_tile)
    item_capacity, merge_capacity = (num_items, num_merges) if capacity is None else (capacity.items, capacity.merges)
    item_ints = item_capacity * ITEM_INTS
    record_ints = item_ints + merge_capacity * MERGE_INTS
    ints = allocate(record_ints + (0 if key_bounds is None else len(key_bounds)))
    items, merges = ints[:item_ints].reshape(-1, ITEM_INTS), ints[item_ints:record_ints].reshape(-1, MERGE_INTS)
    if key_bounds is not None:
        ints[record_ints:] = key_bounds
    requests = _request_records(lengths)
    if num_merges:
        _write_merges(merges[:num_merges], requests, tiles, splits)
    _write_items(items[:num_items], requests, params, tiles, splits, order)
    if capacity is not None:
        items[num_items:] = 0
        merges[num_merges:] = 0
    num_partials = splits.first_partial.item(-1) + splits.num_splits.item(-1) if num_merges else 0
    bounds_at = None if key_bounds is None else record_ints
    return WorkList(num_partials, item_capacity, merge_capacity, ints, bounds_at)


def _write_items(
    items: np.ndarray,
    records: np.ndarray,
    params: SchedulerParams,
    tiles: QueryTiles,
    splits: Splits,
    order: np.ndarray,
) -> None:
    """Writes the items in `order`. `records`: of requests, which are overwritten."""
    if splits.tile is not None:
        records = records.take(tiles.requests_of(splits.tile), 0)
    elif tiles.request is not None:
        records = records.take(tiles.request, 0)
    if tiles.request is not None:  # else all begin at 0
        records[:, _FIRST_ROW] = tiles.first_row if splits.tile is None else tiles.first_row.take(splits.tile)
    if splits.tile is not None or params.window_left >= 0:  # else all begin at 0
        np.multiply(splits.begin, params.cols, out=records[:, _KV_BEGIN], casting="unsafe")
    end = records[:, _KV_END]
    np.multiply(splits.end, params.cols, out=end, casting="unsafe")
    np.minimum(end, records[:, _KV_LEN], out=end)
    if splits.partial is not None:
        records[:, _PARTIAL] = splits.partial
    records.take(order, 0, out=items, mode="clip")  # "clip" spares numpy a copy of `out`


def _write_merges(merges: np.ndarray, requests: np.ndarray, tiles: QueryTiles, splits: Splits) -> None:
    merges[:, :2] = requests[:, :2].take(tiles.requests_of(splits.merge_tile), 0)  # qo_start, qo_len
    merges[:, 2] = tiles.first_row.take(splits.merge_tile)
    merges[:, 3] = splits.first_partial
    merges[:, 4] = splits.num_splits
    merges[:, len(Merge._fields) :] = 0


def _request_records(lengths: BatchLengths) -> np.ndarray:
    """Returns one item record per request, with the fields that all items of the request share, and no partial."""
    batch_size = len(lengths.kv_len)
    records = np.zeros((batch_size, ITEM_INTS), np.int32)
    records[:, _PARTIAL] = NO_PARTIAL
    records[:, _REQUEST] = np.arange(batch_size)
    records[:, _QO_START] = lengths.qo_indptr[:-1]
    records[:, _QO_LEN] = lengths.qo_len
    records[:, _KV_START] = lengths.kv_start
    records[:, _KV_LEN] = lengths.kv_len
    if lengths.mask_offset is not None:
        records[:, _MASK_LOW] = lengths.mask_offset & 0xFFFFFFFF
        records[:, _MASK_HIGH] = lengths.mask_offset >> 32
    return records


def longest_first(cost: np.ndarray) -> np.ndarray:
    """Returns indices by descending cost, rounded to a 256th of the largest; the sort is stable."""
    width = (largest(cost) if len(cost) else 0) // SORT_BINS + 1
    bins = cost if width == 1 else cost // width
    # numpy's stable sort is a radix sort up to 16 bits: 8 times faster than for 32
    return (~bins.astype(np.uint8)).argsort(kind="stable")


def orders_by_l2(params: SchedulerParams, items: int, merges: int) -> bool:
    """Tells whether items are ordered by L2 group before length: not in few waves, the last of which would end late;
    nor where last waves may be cut and tiles have parts, which come last.
    """
    if merges and params.cuts_last_wave:
        return False
    return bool(params.l2_kv_tokens) and items * params.num_kv_heads >= L2_ORDER_MIN_WAVES * params.resident_ctas


def l2_groups(lengths: BatchLengths, params: SchedulerParams) -> np.ndarray:
    """Returns the group of every request, longest requests first: the keys of one group fit L2 together, unless there
    are more than 256 times as many. Some request has keys, and therefore the first.
    """
    by_length = longest_first(lengths.kv_len)
    ends = lengths.kv_len.take(by_length).cumsum()
    group_tokens = max(params.l2_kv_tokens, (ends.item(-1) - 1) // SORT_BINS + 1)
    groups = np.empty(len(ends), np.uint8)  # sorted like `longest_first`
    groups[by_length] = (ends - 1) // group_tokens
    return groups


def typical_qo_len(lengths: BatchLengths, limits: BatchLimits) -> int:
    """Returns the query tokens of a typical request, by which the tile is chosen.

    The number is the same for all plans of a captured launch.
    """
    if limits.max_qo_len is not None:
        return limits.max_qo_len
    if limits.graph:
        return ceil_div(limits.graph.max_rows, max(1, limits.graph.batch_size))
    return -(-(lengths.rows - lengths.first_row) // (lengths.with_queries or 1))


def typical_kv_len(lengths: BatchLengths, limits: BatchLimits) -> int | None:
    """Returns the mean number of keys of a request, by which the tile is chosen; where lengths are on the device, that
    of the tokens in k and v. None where a captured launch serves other lengths too.
    """
    if limits.keeps_address:
        return None
    if limits.graph:
        return ceil_div(limits.graph.max_kv_tokens, max(1, limits.graph.batch_size))
    return ceil_div(lengths.total_kv, max(1, lengths.batch_size))


def max_qo_len(lengths: BatchLengths, limits: BatchLimits) -> int:
    """Returns an upper bound of the query tokens of any request, the same for all plans of a captured launch."""
    if limits.max_qo_len is not None:
        return limits.max_qo_len
    if limits.graph:
        return limits.graph.max_rows
    return lengths.longest_qo


# --- launches of a fixed size (CUDA graphs) --------------------------------------------------------------------------


def record_capacity(params: SchedulerParams, limits: BatchLimits) -> Capacity:
    """Returns how many records a schedule may have. With `limits.graph`, every schedule within the limits fits."""
    partials = limits.workspace_bytes // params.partial_bytes
    if limits.graph is None:
        return Capacity(UNLIMITED, 0 if limits.disable_split_kv else UNLIMITED, partials)
    tiles = max_query_tiles(limits.graph, params)
    kv_tiles = ceil_div(limits.graph.max_kv_tokens, params.cols)
    if limits.disable_split_kv:
        return Capacity(tiles, 0, 0)
    if limits.fixed_split_size is not None:
        chunk = max(1, ceil_div(limits.fixed_split_size, params.cols))
        if kv_tiles <= chunk or partials < 2:
            return Capacity(tiles, 0, 0)
        items = min(max_fixed_size_splits(limits.graph, params, chunk), tiles + partials)
        return Capacity(items, min(tiles, items // 2, partials // 2), partials)
    if kv_tiles < 2 * params.min_split_tiles or partials < 2 or _fills_waves(params, limits):
        return Capacity(tiles, 0, 0)
    wave = ceil_div(params.resident_ctas, params.num_kv_heads)
    merges = min(tiles, partials // 2, max(wave, MERGE_ROWS // (params.num_kv_heads * params.rows)))
    return Capacity(tiles + min(EXTRA_WAVES * wave, partials), merges, partials)


def _fills_waves(params: SchedulerParams, limits: BatchLimits) -> bool:
    """Tells whether a batch with lengths on the device is a prefill whose query tiles fill the GPU. The search
    splits none of 200 random ones, and a combine launch costs some 3 us even without work.
    """
    graph = limits.graph
    if graph is None or limits.keeps_address or params.cuts_last_wave:
        return False
    if graph.max_kv_tokens > MOST_PREFILL_KEYS * graph.max_rows:
        return False
    items = graph.max_rows * params.group_size // params.rows * params.num_kv_heads
    return items * 2 >= 3 * params.resident_ctas


def max_query_tiles(graph: GraphLimits, params: SchedulerParams) -> int:
    """Returns the largest number of query tiles of any batch within the limits."""
    requests = min(graph.batch_size, graph.max_rows)
    if params.group_size >= params.rows:
        tiles = graph.max_rows * ceil_div(params.group_size, params.rows)
    else:  # each tile after a request's first takes this many more tokens
        tiles = requests + (graph.max_rows - requests) // (params.rows // params.group_size)
    if graph.max_qo_len is None:
        return tiles
    return min(tiles, requests * ceil_div(graph.max_qo_len * params.group_size, params.rows))


def max_fixed_size_splits(graph: GraphLimits, params: SchedulerParams, chunk: int) -> int:
    """Returns the largest number of items of any batch within the limits, split at multiples of `chunk` kv tiles."""
    kv_tiles = ceil_div(graph.max_kv_tokens, params.cols)
    requests = min(graph.batch_size, graph.max_rows)
    bound = max_query_tiles(graph, params) * min(MAX_SPLITS, ceil_div(kv_tiles, chunk))  # as if every tile saw all keys
    if graph.max_qo_len is None:
        return bound
    tiles_per_request = ceil_div(graph.max_qo_len * params.group_size, params.rows)
    return min(bound, tiles_per_request * (requests + graph.max_kv_tokens // (chunk * params.cols)))
