"""The schedule of a batch: which item reads which keys of which query tile, in which order. Pure numpy, no device.

    query tiles   `rows` packed rows of one request each, and the kv tiles that a band mask lets them see
    pieces        their kv tiles, cut where that shortens the launch (cost_model) or at fixed places
    records       longest piece first, requests that share L2 together; a merge record for every query tile that was cut

Lengths may reach 2^30 tokens, query tokens times the GQA group 2^30 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cute_attn.errors import RuntimeArgumentError, WorkspaceError
from cute_attn.problem import BatchLengths, BatchLimits, GraphLimits
from cute_attn.schedule import cost_model
from cute_attn.schedule.cost_model import Room
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

Memory = Callable[[int], np.ndarray]  # a flat int32 array of a size

UNLIMITED = 1 << 62
MANY = 1 << 20  # query tokens: more than any tile has
GROUPED_WAVES = 4  # of tiles, from which on their order minds what is in L2
EXTRA_WAVES = 2  # of items that cuts may add to a launch of fixed size
MERGE_ROWS = 16384  # rows that the combine launch of a fixed size has, where one wave of items does not need more

_KV_LEN, _FIRST_ROW, _KV_BEGIN, _KV_END, _PARTIAL = (
    Item._fields.index(name) for name in ("kv_len", "first_row", "kv_begin", "kv_end", "partial")
)


class TileShape(NamedTuple):
    """The tile of a launch, the mask that all requests share, and the device."""

    rows: int
    cols: int
    group: int  # num_qo_heads / num_kv_heads
    num_kv_heads: int
    causal: bool
    window_left: int  # negative: none
    slots: int  # CTAs resident on the device
    min_tiles: int  # smallest piece worth its partial: plan.min_split_tiles
    partial_row_bytes: int  # 4 * (head_dim_vo + 1)
    section_heads: int = 0  # kv heads worked on side by side before the next begin; 0: all
    resident: int = 0  # kv tokens of so many heads that L2 holds; 0: the order of requests does not matter


class Work(NamedTuple):
    """Records of a launch. `items` and `merges` are views of `ints`, which is what goes to the device: all items,
    padded with zero records to `item_capacity`, then all merges, padded likewise.
    """

    items: np.ndarray  # [item_capacity, ITEM_INTS] int32
    merges: np.ndarray  # [merge_capacity, MERGE_INTS] int32
    num_partials: int  # slots of the workspace in use
    item_capacity: int
    merge_capacity: int
    ints: np.ndarray  # [item_capacity * ITEM_INTS + merge_capacity * MERGE_INTS] int32


class QueryTiles(NamedTuple):
    """One entry a query tile that has rows, requests in order; int32 but for `request`."""

    request: np.ndarray  # as numpy indexes
    first_row: np.ndarray
    begin: np.ndarray  # kv tiles [begin, end) are visible; both 0 where none is
    end: np.ndarray


class Pieces(NamedTuple):
    """One entry an item, in the order of query tiles."""

    tile: np.ndarray | None  # its query tile; None: there is one item a tile
    begin: np.ndarray
    end: np.ndarray
    partial: np.ndarray | None  # None: no item has one
    cut: np.ndarray  # query tiles of more than one piece ...
    first_partial: np.ndarray  # ... the slot of their first
    splits: np.ndarray  # ... and the number of their pieces


def new_ints(size: int) -> np.ndarray:
    return np.empty(size, np.int32)


def schedule(lengths: BatchLengths, shape: TileShape, limits: BatchLimits, memory: Memory = new_ints) -> Work:
    """The records of a batch, in memory of that size from `memory`.

    Items beyond a tile's first are added only as far as the workspace and, for CUDA graphs, the capacities have room.
    `fixed_split_size` is obeyed to the token instead: WorkspaceError names the bytes it needs where there are fewer.
    """
    tiles = query_tiles(lengths, shape)
    room = capacity(shape, limits)
    if limits.fixed_split_size is not None and not limits.disable_split_kv:
        pieces = _fixed_pieces(tiles, shape, limits)
    else:
        pieces = _balanced_pieces(tiles, shape, room)
    return _records(lengths, shape, tiles, pieces, room if limits.graph else None, memory)


def query_tiles(lengths: BatchLengths, shape: TileShape) -> QueryTiles:
    qo_len = np.diff(lengths.qo_indptr).astype(np.int32)
    kv_len = lengths.kv_len.astype(np.int32)
    tiles = -(-(qo_len * np.int32(shape.group)) // np.int32(shape.rows))
    first = (tiles.cumsum(dtype=np.int32) - tiles).repeat(tiles)  # `repeat` is several times faster than an index
    first_row = (np.arange(len(first), dtype=np.int32) - first) * np.int32(shape.rows)
    begin, end = _visible(first_row, tiles, qo_len, kv_len, shape)
    return QueryTiles(np.arange(len(tiles)).repeat(tiles), first_row, begin, end)


def _visible(
    first_row: np.ndarray, tiles: np.ndarray, qo_len: np.ndarray, kv_len: np.ndarray, shape: TileShape
) -> tuple[np.ndarray, np.ndarray]:
    """kv tiles that some row of a query tile sees; requests have `tiles` of these. Token i stands at
    i + kv_len - qo_len, and `kernels.blocks.masks.Band` does the same for a CTA."""
    group, cols, one = np.int32(shape.group), np.int32(shape.cols), np.int32(1)
    if shape.causal:
        last = np.minimum((first_row + np.int32(shape.rows - 1)) // group, (qo_len - one).repeat(tiles))
        stop = np.maximum(last + (kv_len - qo_len + one).repeat(tiles), np.int32(0))
        end = -(-stop // cols)
    else:
        end = (-(-kv_len // cols)).repeat(tiles)
    if shape.window_left < 0:
        return np.zeros_like(end), end
    position = kv_len - qo_len - np.int32(min(shape.window_left, 1 << 30))
    return np.maximum(first_row // group + position.repeat(tiles), np.int32(0)) // cols, end


def _balanced_pieces(tiles: QueryTiles, shape: TileShape, room: Room) -> Pieces:
    visible = tiles.end - tiles.begin
    device = cost_model.Device(shape.slots / shape.num_kv_heads, shape.min_tiles, shape.rows / shape.cols)
    count = cost_model.pieces(visible, device, room)
    if count is None:
        return _whole(tiles)
    count = np.maximum(count, 1)
    tile, index, partial, *merges = _cut(count)
    begin, visible, of = tiles.begin[tile], visible[tile].astype(np.int64), count[tile]
    return Pieces(tile, begin + index * visible // of, begin + (index + 1) * visible // of, partial, *merges)


def _fixed_pieces(tiles: QueryTiles, shape: TileShape, limits: BatchLimits) -> Pieces:
    """Cuts at multiples of `fixed_split_size` from token 0, whatever a tile sees: they depend on nothing else."""
    size = limits.fixed_split_size
    assert size is not None
    if size < 1:
        raise RuntimeArgumentError(f"fixed_split_size must be at least 1 token, got {size}")
    chunk = min(ceil_div(size, shape.cols), 1 << 30)
    first = tiles.begin // chunk
    count = np.maximum(-(-tiles.end // chunk) - first, 1)
    most = int(count.max(initial=1))
    if most == 1:
        return _whole(tiles)
    if most > MAX_SPLITS:
        least = ceil_div(int(tiles.end.max()), MAX_SPLITS) * shape.cols
        raise RuntimeArgumentError(
            f"fixed_split_size must cut a request into at most {MAX_SPLITS} pieces, got {size} tokens, which make "
            f"{most}; {least} are enough for this batch"
        )
    needed = int(count[count > 1].sum()) * slot_bytes(shape)
    if needed > limits.workspace_bytes:
        raise WorkspaceError(
            f"float_workspace_buffer must have {needed} bytes for fixed_split_size={size} in this batch, "
            f"got {limits.workspace_bytes}"
        )
    tile, index, partial, *merges = _cut(count)
    start = (first[tile] + index) * chunk
    begin, end = np.maximum(start, tiles.begin[tile]), np.minimum(start + chunk, tiles.end[tile])
    return Pieces(tile, begin, end, partial, *merges)


def _whole(tiles: QueryTiles) -> Pieces:
    none = np.empty(0, np.int64)
    return Pieces(None, tiles.begin, tiles.end, None, none, none, none)


def _cut(count: np.ndarray) -> tuple[np.ndarray, ...]:
    """Tile, index within it and partial slot of every piece; cut tiles, their first slots and their piece counts."""
    tile = np.arange(len(count)).repeat(count)
    index = np.arange(len(tile)) - (count.cumsum() - count)[tile]
    several = count > 1
    slots = np.where(several, count, 0)
    first_slot = slots.cumsum() - slots
    partial = np.where(several[tile], first_slot[tile] + index, NO_PARTIAL)
    cut = several.nonzero()[0]
    return tile, index, partial, cut, first_slot[cut], count[cut]


def _records(
    lengths: BatchLengths, shape: TileShape, tiles: QueryTiles, pieces: Pieces, room: Room | None, memory: Memory
) -> Work:
    order = longest_first(pieces.end - pieces.begin)
    if grouped(shape, len(order)) and int(lengths.kv_len.sum()) > shape.resident:
        request = tiles.request if pieces.tile is None else tiles.request[pieces.tile]
        order = order[np.argsort(neighbourhoods(lengths, shape)[request[order]], kind="stable")]
    num_items, num_merges = len(order), len(pieces.cut)
    item_capacity, merge_capacity = (num_items, num_merges) if room is None else (room.items, room.merges)
    item_ints = item_capacity * ITEM_INTS
    ints = memory(item_ints + merge_capacity * MERGE_INTS)
    items, merges = ints[:item_ints].reshape(-1, ITEM_INTS), ints[item_ints:].reshape(-1, MERGE_INTS)

    requests = _request_records(lengths)
    requests[:, _PARTIAL] = NO_PARTIAL
    tile = order if pieces.tile is None else pieces.tile.take(order)
    used = items[:num_items]
    requests.take(tiles.request.take(tile), 0, out=used, mode="clip")  # "clip" spares numpy a copy of `out`
    used[:, _FIRST_ROW] = tiles.first_row.take(tile)
    if pieces.tile is not None or shape.window_left >= 0:  # else all begin at 0
        used[:, _KV_BEGIN] = pieces.begin.take(order) * shape.cols
    np.minimum(pieces.end.take(order) * shape.cols, used[:, _KV_LEN], out=used[:, _KV_END], casting="unsafe")
    if pieces.partial is not None:
        used[:, _PARTIAL] = pieces.partial.take(order)
    items[num_items:] = 0

    merges[num_merges:] = 0
    num_partials = 0
    if num_merges:
        num_partials = int(pieces.first_partial[-1] + pieces.splits[-1])
        request = tiles.request[pieces.cut]
        values = (
            lengths.qo_indptr[request],
            lengths.qo_indptr[request + 1] - lengths.qo_indptr[request],
            tiles.first_row[pieces.cut],
            pieces.first_partial,
            pieces.splits,
        )
        merges[:num_merges, len(Merge._fields) :] = 0
        for field, value in enumerate(values):
            merges[:num_merges, field] = value
    return Work(items, merges, num_partials, item_capacity, merge_capacity, ints)


def _request_records(lengths: BatchLengths) -> np.ndarray:
    """An item record for every request, with what all items of the request share."""
    batch_size = len(lengths.kv_len)
    records = np.zeros((batch_size, ITEM_INTS), np.int32)
    starts = lengths.qo_indptr[:-1]
    values = {
        "qo_start": starts,
        "qo_len": lengths.qo_indptr[1:] - starts,
        "kv_start": lengths.kv_start,
        "kv_len": lengths.kv_len,
        "mask_low": lengths.mask_offset & 0xFFFFFFFF,
        "mask_high": lengths.mask_offset >> 32,
        "request": np.arange(batch_size),
    }
    for name, value in values.items():
        records[:, Item._fields.index(name)] = value
    return records


def longest_first(cost: np.ndarray) -> np.ndarray:
    """Indices by falling cost, equal costs in order."""
    longest = int(cost.max(initial=0))
    if longest < 1 << 16:  # numpy's stable sort is a radix sort up to 16 bits: 8 times faster than for 32
        return np.argsort((longest - cost).astype(np.uint8 if longest < 1 << 8 else np.uint16), kind="stable")
    return np.argsort(-cost, kind="stable")


def grouped(shape: TileShape, items: int) -> bool:
    """Whether what shares L2 goes before what is long: not in few waves, which would end late."""
    return bool(shape.resident) and items * shape.num_kv_heads >= GROUPED_WAVES * shape.slots


def neighbourhoods(lengths: BatchLengths, shape: TileShape) -> np.ndarray:
    """A number for every request, longest first: the keys of requests with one number stay in L2 together."""
    by_length = longest_first(lengths.kv_len)
    found = np.empty_like(by_length)
    found[by_length] = np.maximum(lengths.kv_len[by_length].cumsum() - 1, 0) // shape.resident
    return found


def slot_bytes(shape: TileShape) -> int:
    return shape.num_kv_heads * shape.rows * shape.partial_row_bytes


def rows_of_a_request(lengths: BatchLengths, limits: BatchLimits) -> int:
    """Query tokens of a typical request: they decide the tile. A captured launch keeps it over plans, and so does one
    whose bits must not depend on the other requests of a batch, which is what fixed splits are for.
    """
    if limits.max_qo_len is not None:
        return limits.max_qo_len
    if limits.fixed_split_size is not None or limits.disable_split_kv:
        return MANY
    if limits.graph:
        return ceil_div(limits.graph.max_rows, max(1, limits.graph.batch_size))
    starts = lengths.qo_indptr
    requests = int((starts[1:] > starts[:-1]).sum())
    return ceil_div(int(starts[-1] - starts[0]), max(1, requests))


def longest_request(lengths: BatchLengths, limits: BatchLimits) -> int:
    if limits.max_qo_len is not None:
        return limits.max_qo_len
    if limits.graph:
        return limits.graph.max_rows
    return int((lengths.qo_indptr[1:] - lengths.qo_indptr[:-1]).max(initial=0))


# --- launches of a fixed size (CUDA graphs) --------------------------------------------------------------------------


def capacity(shape: TileShape, limits: BatchLimits) -> Room:
    """The records that a schedule may have. With `limits.graph`, every schedule within the limits fits."""
    partials = limits.workspace_bytes // slot_bytes(shape)
    if limits.graph is None:
        return Room(UNLIMITED, 0 if limits.disable_split_kv else UNLIMITED, partials)
    tiles = most_tiles(limits.graph, shape)
    kv_tiles = ceil_div(limits.graph.max_kv_tokens, shape.cols)
    if limits.disable_split_kv:
        return Room(tiles, 0, 0)
    if limits.fixed_split_size is not None:
        chunk = max(1, ceil_div(limits.fixed_split_size, shape.cols))
        if kv_tiles <= chunk or partials < 2:
            return Room(tiles, 0, 0)
        items = min(most_fixed_pieces(limits.graph, shape, chunk), tiles + partials)
        return Room(items, min(tiles, items // 2, partials // 2), partials)
    if kv_tiles < 2 * shape.min_tiles or partials < 2:
        return Room(tiles, 0, 0)
    wave = ceil_div(shape.slots, shape.num_kv_heads)
    merges = min(tiles, partials // 2, max(wave, MERGE_ROWS // (shape.num_kv_heads * shape.rows)))
    return Room(tiles + min(EXTRA_WAVES * wave, partials), merges, partials)


def most_tiles(graph: GraphLimits, shape: TileShape) -> int:
    """Query tiles of any batch within the limits."""
    requests = min(graph.batch_size, graph.max_rows)
    if shape.group >= shape.rows:
        tiles = graph.max_rows * ceil_div(shape.group, shape.rows)
    else:  # a tile beyond a request's first needs this many tokens more
        tiles = requests + (graph.max_rows - requests) // (shape.rows // shape.group)
    if graph.max_qo_len is None:
        return tiles
    return min(tiles, requests * ceil_div(graph.max_qo_len * shape.group, shape.rows))


def most_fixed_pieces(graph: GraphLimits, shape: TileShape, chunk: int) -> int:
    """Items of any batch within the limits, its keys cut at multiples of `chunk` tiles."""
    kv_tiles = ceil_div(graph.max_kv_tokens, shape.cols)
    requests = min(graph.batch_size, graph.max_rows)
    most = most_tiles(graph, shape) * min(MAX_SPLITS, ceil_div(kv_tiles, chunk))  # every tile sees all keys
    if graph.max_qo_len is None:
        return most
    of_one = ceil_div(graph.max_qo_len * shape.group, shape.rows)
    return min(most, of_one * (requests + graph.max_kv_tokens // (chunk * shape.cols)))
