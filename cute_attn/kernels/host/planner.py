"""Host code of the planner kernel, which writes the schedules of batches.

The host knows no more of a schedule than its tiling and how many records it may have (`schedule.batch`), from which the
sizes of launches follow: the schedule may be any that fits.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from cute_attn.errors import RuntimeArgumentError
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.params import Fields
from cute_attn.kernels.plan.spec import PlanSpec
from cute_attn.problem import BatchLengths, BatchLimits, DeviceLengths, LaunchSizes, Lengths
from cute_attn.request.settings import MAX_KV_LEN
from cute_attn.runtime.launch import Values, current_stream
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.batch import (
    capacity_for,
    fixed_chunk,
    max_fixed_size_splits,
    max_query_tiles,
    record_capacity,
)
from cute_attn.schedule.params import Capacity, SchedulerParams
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

MAX_TILES = 1 << 24  # query tiles and records: the kernel sums several of them in 32 bits
MAX_PRODUCT = (1 << 31) - 1  # of items and kv heads
LENGTH_FIELDS = ("qo_indptr", "kv_indptr", "last_page_len", "kv_len", "mask_offset", "q_len", "max_kv", "fresh")
SCHEDULER_FIELDS = (  # of `SchedulerParams`
    *("rows", "cols", "group_size", "num_kv_heads", "causal", "resident_ctas", "min_split_tiles", "partial_cost"),
)
ROOM_FIELDS = (
    *("batch_size", "max_rows", "max_pages", "fixed_chunk"),
    *("max_tiles", "item_capacity", "merge_capacity", "partial_capacity"),
)
MEMORY_FIELDS = ("items", "merges", "counts", "first_tile", "groups", "order", "tiles", "splits")
COUNTS = 4  # int32 numbers: items and merges of the schedule, two unused
NOTHING = np.empty(0, np.int64)


@dataclass
class Room:
    """Sizes of a schedule, and of what the kernel may read and write for it."""

    capacity: Capacity
    sizes: LaunchSizes  # keys only where these are fixed before the lengths: on the device, or captured
    tiles: int  # query tiles
    chunk: int  # kv tiles of splits of a fixed size, or 0

    @classmethod
    def of(cls, lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits) -> Room:
        """Return the room for lengths on the host. Raises what hinders their schedule."""
        sizes = limits.sizes or LaunchSizes(lengths.batch_size, lengths.rows, 0, lengths.longest_qo)
        tiles, chunk = max_query_tiles(sizes, params), fixed_chunk(params, limits)
        room = cls(capacity_for(lengths, params, limits), sizes, tiles, chunk)
        if not room.is_countable(params, lengths.longest_kv):
            raise RuntimeArgumentError(
                f"a batch must have at most {MAX_TILES} query tiles and splits of them, and {MAX_PRODUCT} for all kv "
                f"heads, got {max(tiles, room.capacity.items)} for {lengths.rows} query tokens and requests of up to "
                f"{lengths.longest_kv} keys: plan fewer requests at a time"
            )
        return room

    @classmethod
    def bounded(cls, params: SchedulerParams, limits: BatchLimits) -> Room | None:
        """Return the room for all batches within `limits.sizes`; None where one might need more than the kernel counts,
        or splits of a fixed size that do not fit the workspace or a merge.
        """
        sizes, chunk = limits.sizes, fixed_chunk(params, limits)
        assert sizes is not None
        room = cls(record_capacity(params, limits), sizes, max_query_tiles(sizes, params), chunk)
        if not room.is_countable(params, room.most_keys):
            return None
        parts = ceil_div(ceil_div(sizes.max_kv_tokens, params.cols), chunk) if chunk else 1
        slots = limits.workspace_bytes // params.partial_bytes
        fits = parts <= 1 or (parts <= MAX_SPLITS and max_fixed_size_splits(sizes, params, chunk) <= slots)
        return room if fits else None

    @property
    def most_keys(self) -> int:
        """Of a request, where the host does not know the lengths."""
        return min(self.sizes.max_kv_tokens, MAX_KV_LEN)

    def is_countable(self, params: SchedulerParams, longest_kv: int) -> bool:
        """Tell whether records and products of them fit the kernel's integers."""
        items, kv_tiles = self.capacity.items, ceil_div(longest_kv, params.cols)
        unsigned = kv_tiles * MAX_SPLITS <= 2 * MAX_PRODUCT
        return unsigned and items * params.num_kv_heads <= MAX_PRODUCT and max(self.tiles, items) <= MAX_TILES

    @functools.cached_property
    def memory(self) -> tuple[int, int, tuple[int, ...]]:
        """The int32 numbers of items, those of items and merges, and where the arrays that the kernel keeps for itself
        begin, and the last one ends: 16-byte alignment.
        """
        (items, merges, _), batch = self.capacity, self.sizes.batch_size
        sizes = COUNTS, batch + 1, batch, max(items, batch), 4 * self.tiles, 4 * items
        starts = itertools.accumulate((-(-size // 4) * 4 for size in sizes), initial=0)
        return items * ITEM_INTS, items * ITEM_INTS + merges * MERGE_INTS, (*starts,)


class Planner:
    """The planner kernel for one tiling."""

    def __init__(self, params: SchedulerParams, page_size: int, gpu: Gpu) -> None:
        self.params, self.page_size, self.device_index = params, page_size, gpu.device_index
        static: Fields = {
            "page_size": page_size,
            **{name: int(getattr(params, name)) for name in SCHEDULER_FIELDS},
            "window_left": max(-1, min(params.window_left, 1 << 30)),
            "l2_kv_tokens": min(params.l2_kv_tokens, MAX_PRODUCT),
        }
        kernel = gpu.loaded(PlanSpec(), enable_pdl=False)
        self.launch = kernel.bind(static, LENGTH_FIELDS, ROOM_FIELDS, MEMORY_FIELDS)

    def placed(self, lengths: Lengths, room: Room, staging: Staging, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare a launch, and return the device memory of the records, and that of what the host uploads: the key
        bounds of multi-item scoring, with zeros for rows of the last tile that do not exist, and the lengths. `fixed`:
        their addresses stay.
        """
        if isinstance(lengths, BatchLengths):
            longest_kv = lengths.longest_kv
            uploaded, read = _upload(lengths, room.sizes.max_rows + self.params.rows, staging, fixed)
        else:
            longest_kv, uploaded, read = room.most_keys, staging.uploaded, _on_device(lengths)
        of_items, of_records, (*starts, scratch) = layout = room.memory
        records, kept, fresh = staging.written_on_device(of_records, scratch, layout, fixed)
        items, counts = records.data_ptr(), kept.data_ptr()
        memory = items, items + 4 * of_items, *[counts + 4 * start for start in starts]
        settled = (1, 1, 1), self.values(room, longest_kv), memory
        staging.write(functools.partial(self, (*read, int(fresh)), settled))
        return records, uploaded

    def values(self, room: Room, longest_kv: int) -> Values:
        """Return the values of ROOM_FIELDS."""
        sizes, (items, merges, partials) = room.sizes, room.capacity
        pages = max(ceil_div(longest_kv, self.page_size), 1)
        chunk = min(room.chunk, ceil_div(longest_kv, self.params.cols) + 1)
        return sizes.batch_size, sizes.max_rows, pages, chunk, room.tiles, items, merges, min(partials, MAX_PRODUCT)

    def __call__(self, lengths: Values, settled: tuple[object, ...]) -> None:
        """Launch the kernel on the current stream."""
        self.launch.fire(current_stream(self.device_index), lengths, settled)


def _on_device(lengths: DeviceLengths) -> Values:
    """Return the values of LENGTH_FIELDS but the last."""
    arrays = lengths.qo_indptr, lengths.kv_indptr, lengths.last_page_len
    return *(0 if x is None else x.data_ptr() for x in arrays), 0, 0, lengths.q_len or 0, lengths.kv_end


def _upload(lengths: BatchLengths, max_rows: int, staging: Staging, fixed: bool) -> tuple[torch.Tensor, Values]:
    """Prepare a copy of key bounds, of which there are `max_rows` rows, and of lengths; return its memory, and the
    values of LENGTH_FIELDS but the last.
    """
    keys, mask = lengths.key_bounds, lengths.mask_offset
    bounds = NOTHING if keys is None else np.pad(keys.ravel(), (0, 2 * (max_rows - len(keys))))
    masks = NOTHING if mask is None else mask.view(np.int32)  # low and high halves
    uploaded = staging.upload(bounds, lengths.qo_indptr, lengths.kv_start, lengths.kv_len, masks, fixed=fixed)
    requests, qo_indptr = lengths.batch_size, uploaded.data_ptr() + 4 * len(bounds)
    kv_start = qo_indptr + 4 * (requests + 1)
    kv_len = kv_start + 4 * requests
    mask_offset = kv_len + 4 * requests if len(masks) else 0
    return uploaded, (qo_indptr, kv_start, 0, kv_len, mask_offset, 0, lengths.kv_end)
