"""Static schedule of a batch: a list of work items, each one query tile against a range of keys. Pure numpy, no device.

    query tiles   `rows` packed rows of one request each, and the kv tiles that a band mask lets them see
    splits        their kv tiles, split where that shortens the launch (cost_model) or at fixed positions
    records       longest split first, grouped by requests that share L2; a merge record per query tile with splits

Lengths may reach 2^30 tokens, query tokens times the GQA group size 2^30 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cute_attn.errors import RuntimeArgumentError, WorkspaceError
from cute_attn.problem import UNLIMITED, BatchLengths, BatchLimits, GraphLimits, largest
from cute_attn.schedule import cost_model
from cute_attn.schedule.constants import L2_ORDER_MIN_WAVES, SORT_BINS
from cute_attn.schedule.cuts import Capacity, SchedulerParams
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

AllocateInts = Callable[[int], np.ndarray]  # allocates a flat int32 array of the given size

EXTRA_WAVES = 2  # waves of items that splits may add to a launch of fixed size
MOST_PREFILL_KEYS = 2  # keys per query token of a batch that counts as prefill: a request has few tiles or few keys
LONG_KEYS = 16384  # of a request: cutting the last wave gains more than a combine launch without work costs
MERGE_ROWS = 16384  # rows of a combine launch of fixed size, unless one wave of items needs more

_QO_START, _QO_LEN, _KV_START, _KV_LEN, _FIRST_ROW, _KV_BEGIN, _KV_END, _PARTIAL, _MASK_LOW, _MASK_HIGH, _REQUEST = (
    range(len(Item._fields))
)
_NO_BOUNDS = np.empty(0, np.int64)
_NO_MERGES = np.empty((0, MERGE_INTS), np.int32)


class Size(NamedTuple):
    """What of the lengths of a launch decides its tile."""

    qo_len: int  # query tokens of a typical request
    kv_len: int | None  # mean number of keys of a request
    # ^ None: a captured launch serves other lengths too, or results must not depend on lengths: those of fixed splits
    rows: int  # query tokens of all requests
    longest: int  # keys of the longest request of a batch, where its order considers them, else 0


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


class Items(NamedTuple):
    """Query tiles that have rows, in the order of requests, or the work items that they are split into."""

    records: np.ndarray  # [items, ITEM_INTS] int32, without the fields that `_item_records` writes
    begin: np.ndarray  # kv tiles [begin, end) are seen; both are 0 where none is; begin is 0 without a window
    end: np.ndarray
    visible: np.ndarray  # their number, without those of `gap`
    gap: np.ndarray | None = None  # [2, items]: first and end of the kv tiles that multi-item scoring hides

    def take(self, which: np.ndarray) -> Items:
        """Returns some query tiles."""
        begin, end, visible = (x.take(which) for x in self[1:4])
        gap = None if self.gap is None else self.gap.take(which, 1)
        return Items(self.records.take(which, 0), begin, end, visible, gap)

    def part(self, first: np.ndarray, stop: np.ndarray) -> Items:
        """Returns of each one the kv tiles `first` to `stop`, numbers among those that it sees."""
        if self.gap is None:
            begin, end = first + self.begin, stop + self.begin
        else:
            begin, end = self._seen(first, self.gap), self._seen(stop - 1, self.gap) + 1
        return Items(self.records, begin, end, stop - first, self.gap)

    def _seen(self, index: np.ndarray, gap: np.ndarray) -> np.ndarray:
        """Returns the kv tile that is number `index` of those that each one sees."""
        kv_tile, first = index + self.begin, np.maximum(gap[0], self.begin)
        return kv_tile + np.maximum(gap[1] - first, 0) * (kv_tile >= first)


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
    tiles = query_tiles(lengths, params)
    num_splits, chunk = _num_splits(tiles, params, limits, capacity)
    items, merges, partials = tiles, _NO_MERGES, 0
    if len(num_splits):
        items, (merges, partials) = _split(tiles, num_splits, chunk), _merges(tiles, num_splits)
    needed = Capacity(len(items.end), len(merges), partials)
    work = _work_list(needed, capacity, limits, allocate, _key_bounds(lengths, params, limits))
    records, late = _item_records(params, items), 0 if chunk else needed.merges
    records.take(_item_order(lengths, params, items, late), 0, out=work.items[: needed.items], mode="clip")
    # ^ "clip" spares numpy a copy of `out`
    if needed.merges:
        work.merges[: needed.merges] = merges
    return work


def _work_list(
    needed: Capacity, capacity: Capacity, limits: BatchLimits, allocate: AllocateInts, key_bounds: np.ndarray
) -> WorkList:
    """Returns a work list with room for the records that are needed, in captured launches for all that may be, and with
    the key bounds.
    """
    items, merges, _ = needed if limits.graph is None else capacity
    record_ints = items * ITEM_INTS + merges * MERGE_INTS
    ints = allocate(record_ints + len(key_bounds))
    if limits.graph is not None:
        ints[:record_ints] = 0
    ints[record_ints:] = key_bounds
    return WorkList(needed.partials, items, merges, ints, record_ints if len(key_bounds) else None)


def _key_bounds(lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits) -> np.ndarray:
    """Returns the key bounds of all rows, flat, then zeros for rows of the last tile that do not exist; for a captured
    launch zeros for all rows that it has room for. Empty: no bounds.
    """
    if lengths.key_bounds is None:
        return _NO_BOUNDS
    rows = len(lengths.key_bounds) if limits.graph is None else limits.graph.max_rows
    return np.pad(lengths.key_bounds.ravel(), (0, 2 * (rows - len(lengths.key_bounds) + params.rows)))


def query_tiles(lengths: BatchLengths, params: SchedulerParams) -> Items:
    """Returns the query tiles of all requests, each with the kv tiles that it sees."""
    group, rows, kv_len = params.group_size, params.rows, lengths.kv_len
    causal, position = params.causal, kv_len - lengths.qo_len  # of query token 0
    records = _request_records(lengths)
    if lengths.longest_qo * group <= rows and lengths.with_queries == len(kv_len):
        first_row, causal = np.zeros(len(kv_len), np.int64), False  # one tile each, whose last token sees all keys
    else:
        tiles = (lengths.qo_len * group + (rows - 1)) // rows
        request = np.arange(len(kv_len)).repeat(tiles)
        first_row = (np.arange(len(request)) - (tiles.cumsum() - tiles).take(request)) * rows
        records, kv_len, position = records.take(request, 0), kv_len.take(request), position.take(request)
        records[:, _FIRST_ROW] = first_row
    begin, end = _visible_kv_tiles(first_row, position, kv_len, causal, params)
    if lengths.key_bounds is None:
        return Items(records, begin, end, end if params.window_left < 0 else end - begin)
    # `kernels.blocks.masks.KeyBounds` leaves the same tiles out in a CTA.
    prefix_end, item_start = lengths.key_bounds[records[:, _QO_START] + first_row // group].T
    hidden = -(-prefix_end // params.cols)
    gap = np.stack((hidden, np.maximum(item_start // params.cols, hidden)))
    return Items(records, begin, end, _visible(begin, end, gap), gap)


def _visible(begin: np.ndarray, end: np.ndarray, gap: np.ndarray | None) -> np.ndarray:
    """Returns the number of kv tiles in [begin, end) that multi-item scoring does not hide."""
    if gap is None:
        return end - begin
    return end - begin - np.maximum(np.minimum(gap[1], end) - np.maximum(gap[0], begin), 0)


def _visible_kv_tiles(
    first_row: np.ndarray, position: np.ndarray, kv_len: np.ndarray, causal: bool, params: SchedulerParams
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of kv tiles that some row of each query tile sees, of a request of this length.

    Query token i has position i + `position`; `kernels.blocks.masks.Band` computes the same bounds in a CTA.
    """
    group, cols, stop = params.group_size, params.cols, kv_len
    if causal:
        stop = (first_row + (params.rows - 1)) // group  # the last token, if it exists
        stop += position
        stop += 1
        np.minimum(stop, kv_len, out=stop)
        np.maximum(stop, 0, out=stop)
    end = -(-stop // cols)
    if params.window_left < 0:
        return np.zeros(len(end), np.int64), end
    start = first_row // group + position - params.window_left
    return np.maximum(start, 0) // cols, end


def _num_splits(
    tiles: Items, params: SchedulerParams, limits: BatchLimits, capacity: Capacity
) -> tuple[np.ndarray, int]:
    """Returns the splits of each query tile, nothing where none is split; and their size in kv tiles where these begin
    at its multiples, 0 where they are equal parts of what a tile sees.
    """
    size, chunk = limits.fixed_split_size, fixed_chunk(params, limits)
    if not chunk:
        return cost_model.num_splits(tiles.visible, params, capacity), 0
    num_splits = np.maximum(-(-tiles.end // chunk) - tiles.begin // chunk, 1)
    most_splits = int(num_splits.max(initial=1))
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
    return num_splits, chunk


def fixed_chunk(params: SchedulerParams, limits: BatchLimits) -> int:
    """Returns the kv tiles of splits of a fixed size; 0: the cost model decides on splits, or there are none."""
    size = limits.fixed_split_size
    if size is None or limits.disable_split_kv:
        return 0
    if size < 1:
        raise RuntimeArgumentError(f"fixed_split_size must be at least 1 token, got {size}")
    return min(ceil_div(size, params.cols), 1 << 30)


def _split(tiles: Items, num_splits: np.ndarray, chunk: int) -> Items:
    """Returns the work items of query tiles, split at multiples of `chunk` kv tiles from token 0, or for 0 into equal
    parts.
    """
    tile = np.arange(len(num_splits)).repeat(num_splits)
    index = np.arange(len(tile)) - (num_splits.cumsum() - num_splits).take(tile)  # of a split among those of its tile
    items, parts = tiles.take(tile), num_splits.take(tile)
    is_part = parts > 1
    items.records[:, _PARTIAL] = is_part.cumsum() * is_part + NO_PARTIAL  # from 0 on
    if chunk:
        start = (items.begin // chunk + index) * chunk
        begin, end = np.maximum(start, items.begin), np.minimum(start + chunk, items.end)
        return items._replace(begin=begin, end=end, visible=_visible(begin, end, items.gap))
    before = index * items.visible
    return items.part(before // parts, (before + items.visible) // parts)


def _merges(tiles: Items, num_splits: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the records of merges of the query tiles that are split, and the number of their partials."""
    several = (num_splits > 1).nonzero()[0]
    tile, parts = tiles.records.take(several, 0), num_splits.take(several)
    ends = parts.cumsum()
    records = np.zeros((len(several), MERGE_INTS), np.int32)
    records[:, :2] = tile[:, :2]  # qo_start, qo_len
    records[:, 2] = tile[:, _FIRST_ROW]
    records[:, 3] = ends - parts  # first_partial
    records[:, 4] = parts
    return records, ends.item(-1) if len(ends) else 0


def _item_order(lengths: BatchLengths, params: SchedulerParams, items: Items, late: int) -> np.ndarray:
    """Returns the order of items: longest first, within groups of requests that share L2 where these matter."""
    ranks = _ranks(items.visible)
    if orders_by_l2(params, len(ranks), late) and lengths.total_kv > params.l2_kv_tokens:
        ranks = l2_groups(lengths, params).take(items.records[:, _REQUEST]) * SORT_BINS + ranks
    return ranks.argsort(kind="stable")


def _item_records(params: SchedulerParams, items: Items) -> np.ndarray:
    """Returns the records of items, with the keys of each one."""
    records, end = items.records, items.end * params.cols
    records[:, _KV_BEGIN] = items.begin * params.cols
    records[:, _KV_END] = np.minimum(end, records[:, _KV_LEN], out=end)
    return records


def _request_records(lengths: BatchLengths) -> np.ndarray:
    """Returns one item record per request, with the fields that all items of the request share."""
    records = np.zeros((lengths.batch_size, ITEM_INTS), np.int32)
    records[:, _QO_START] = lengths.qo_indptr[:-1]
    records[:, _QO_LEN] = lengths.qo_len
    records[:, _KV_START] = lengths.kv_start
    records[:, _KV_LEN] = lengths.kv_len
    records[:, _PARTIAL] = NO_PARTIAL
    if lengths.mask_offset is not None:
        records[:, _MASK_LOW] = lengths.mask_offset & 0xFFFFFFFF
        records[:, _MASK_HIGH] = lengths.mask_offset >> 32
    records[:, _REQUEST] = np.arange(lengths.batch_size)
    return records


def _ranks(cost: np.ndarray) -> np.ndarray:
    """Returns numbers below SORT_BINS, the smaller the larger the cost is, to be sorted by: costs count in 256ths of
    the largest. numpy's stable sort is a radix sort up to 16 bits, 8 times faster than for 32.
    """
    width = (largest(cost) if len(cost) else 0) // SORT_BINS + 1
    bins = cost if width == 1 else cost // width
    return ~bins.astype(np.uint8)


def orders_by_l2(params: SchedulerParams, items: int, late: int) -> bool:
    """Tells whether items are ordered by L2 group before length: not in few waves, the last of which would end late;
    nor where so many query tiles have parts that come last, as the cost model wants them.
    """
    if late or not params.l2_kv_tokens:
        return False
    return items * params.num_kv_heads >= L2_ORDER_MIN_WAVES * params.resident_ctas


def l2_groups(lengths: BatchLengths, params: SchedulerParams) -> np.ndarray:
    """Returns the group of every request, longest requests first: the keys of one group fit L2 together, unless there
    are more than 256 times as many. Some request has keys, and therefore the first.
    """
    by_length = _ranks(lengths.kv_len).argsort(kind="stable")
    ends = lengths.kv_len.take(by_length).cumsum()
    group_tokens = max(params.l2_kv_tokens, (ends.item(-1) - 1) // SORT_BINS + 1)
    groups = np.empty(len(ends), np.uint16)
    groups[by_length] = (ends - 1) // group_tokens
    return groups


def typical_qo_len(lengths: BatchLengths, limits: BatchLimits) -> int:
    """Returns the query tokens of a typical request, by which the tile is chosen.

    The number is the same for all plans of a captured launch.
    """
    rows, requests = lengths.rows - lengths.first_row, lengths.with_queries
    if limits.graph:
        rows, requests = limits.graph.max_rows, limits.graph.batch_size
    return ceil_div(rows, requests) if requests else limits.max_qo_len or 0


def size_of(lengths: BatchLengths, limits: BatchLimits) -> Size:
    """Returns the size of a batch; where lengths are on the device, `kv_len` counts the tokens in k and v."""
    keys, requests, rows = lengths.total_kv, lengths.batch_size, lengths.rows - lengths.first_row
    # A blank item, which launches of a fixed size may have, ends a CTA's work: behind it must be no other section.
    longest = lengths.longest_kv
    if limits.graph:
        keys, requests, rows, longest = limits.graph.max_kv_tokens, limits.graph.batch_size, limits.graph.max_rows, 0
    any_lengths = limits.keeps_address or limits.fixed_split_size is not None or limits.disable_split_kv
    return Size(typical_qo_len(lengths, limits), None if any_lengths else ceil_div(keys, requests or 1), rows, longest)


def max_qo_len(lengths: BatchLengths, limits: BatchLimits) -> int:
    """Returns an upper bound of the query tokens of any request, the same for all plans of a captured launch."""
    if limits.graph is None:
        return lengths.longest_qo
    return limits.graph.max_rows if limits.max_qo_len is None else limits.max_qo_len


# --- launches of a fixed size (CUDA graphs) --------------------------------------------------------------------------


def record_capacity(params: SchedulerParams, limits: BatchLimits) -> Capacity:
    """Returns how many records a schedule may have. With `limits.graph`, every schedule within the limits fits."""
    partials = limits.workspace_bytes // params.partial_bytes
    if limits.graph is None:
        return Capacity(UNLIMITED, 0 if limits.disable_split_kv else UNLIMITED, partials)
    tiles = max_query_tiles(limits.graph, params)
    kv_tiles, chunk = ceil_div(limits.graph.max_kv_tokens, params.cols), fixed_chunk(params, limits)
    least = chunk + 1 if chunk else 2 * params.min_split_tiles  # kv tiles of a query tile that is split
    if limits.disable_split_kv or kv_tiles < least or partials < 2:
        return Capacity(tiles, 0, 0)
    if chunk:
        items = min(max_fixed_size_splits(limits.graph, params, chunk), tiles + partials)
        return Capacity(items, min(tiles, items // 2, partials // 2), partials)
    if _fills_waves(params, limits):
        return Capacity(tiles, 0, 0)
    wave = ceil_div(params.resident_ctas, params.num_kv_heads)
    merges = min(tiles, partials // 2, max(wave, MERGE_ROWS // (params.num_kv_heads * params.rows)))
    return Capacity(tiles + min(EXTRA_WAVES * wave, partials), merges, partials)


def _fills_waves(params: SchedulerParams, limits: BatchLimits) -> bool:
    """Tells whether a batch with lengths on the device is a prefill whose query tiles fill the GPU. The search
    splits none of 200 random ones, and a combine launch costs some 3 us even without work.
    """
    graph = limits.graph
    if graph is None or limits.keeps_address:
        return False
    if not params.causal and graph.max_kv_tokens >= LONG_KEYS * graph.batch_size:
        return False  # equal tiles, whose last wave may be cut
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
