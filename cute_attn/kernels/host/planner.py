"""Host code of the planner kernel, which schedules batches whose lengths are on the device.

The host knows no length, only what bounds them (`BatchLimits.graph`): the sizes of launches follow from these, and the
schedule may be any that fits.
"""

from __future__ import annotations

import functools
import itertools

import torch

from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.params import Fields
from cute_attn.kernels.plan.spec import PlanSpec
from cute_attn.problem import BatchLimits, DeviceLengths, GraphLimits
from cute_attn.request.settings import MAX_KV_LEN
from cute_attn.runtime.launch import current_stream
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.batch import fixed_chunk, max_fixed_size_splits, max_query_tiles, record_capacity
from cute_attn.schedule.cuts import SchedulerParams
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS
from cute_attn.schedule.split_kv import MAX_SPLITS, ceil_div

MAX_TILES = 1 << 24  # query tiles and records: the kernel sums several of them in 32 bits
MAX_PRODUCT = (1 << 31) - 1  # of items and kv heads
LENGTH_FIELDS = ("qo_indptr", "kv_indptr", "last_page_len", "q_len", "max_kv")
SCHEDULER_FIELDS = (  # of `SchedulerParams`
    *("rows", "cols", "group_size", "num_kv_heads", "causal", "resident_ctas", "min_split_tiles", "partial_cost"),
)
MEMORY_FIELDS = ("items", "merges", "counts", "first_tile", "groups", "order", "tiles", "splits")
COUNTS = 4  # int32 numbers: items and merges of the schedule, two unused


def schedules_all(params: SchedulerParams, limits: BatchLimits) -> bool:
    """Tells whether the kernel can schedule every batch within these limits: records and products of them fit its
    integers, and splits of a fixed size the workspace.
    """
    assert limits.graph is not None
    graph, items = limits.graph, record_capacity(params, limits).items
    kv_tiles = ceil_div(_longest(graph), params.cols)
    if max(items * params.num_kv_heads, kv_tiles * MAX_SPLITS) > MAX_PRODUCT:
        return False
    if max(max_query_tiles(graph, params), items) > MAX_TILES:
        return False
    chunk = fixed_chunk(params, limits)
    if not chunk:
        return True
    parts = ceil_div(ceil_div(graph.max_kv_tokens, params.cols), chunk)
    room = limits.workspace_bytes // params.partial_bytes
    return parts <= 1 or (parts <= MAX_SPLITS and max_fixed_size_splits(graph, params, chunk) <= room)


def _longest(graph: GraphLimits) -> int:
    return min(graph.max_kv_tokens, MAX_KV_LEN)


class Planner:
    """The planner kernel with the parameters of one tiling and of one set of limits, which it must not refuse."""

    def __init__(self, params: SchedulerParams, limits: BatchLimits, page_size: int, gpu: Gpu) -> None:
        assert limits.graph is not None
        graph = limits.graph
        self.capacity = record_capacity(params, limits)
        max_tiles = max_query_tiles(graph, params)
        items, merges, _ = self.capacity
        self.records = items * ITEM_INTS, merges * MERGE_INTS  # int32 numbers that launches read
        sizes = COUNTS, graph.batch_size + 1, graph.batch_size, max(items, graph.batch_size), 4 * max_tiles, 4 * items
        # Where the arrays that the kernel keeps for itself begin, in numbers, and the last one ends: 16-byte alignment.
        self.scratch = (*itertools.accumulate((-(-size // 4) * 4 for size in sizes), initial=0),)
        self.device_index, self.keeps_address = gpu.device_index, limits.keeps_address
        kv_tiles = ceil_div(_longest(graph), params.cols)
        static: Fields = {
            "batch_size": graph.batch_size,
            "max_rows": graph.max_rows,
            "max_pages": max(_longest(graph) // page_size, 1),
            "page_size": page_size,
            **{name: int(getattr(params, name)) for name in SCHEDULER_FIELDS},
            "window_left": max(-1, min(params.window_left, 1 << 30)),
            "fixed_chunk": min(fixed_chunk(params, limits), kv_tiles + 1),
            "l2_kv_tokens": min(params.l2_kv_tokens, MAX_PRODUCT),
            "max_tiles": max_tiles,
            "item_capacity": items,
            "merge_capacity": merges,
            "partial_capacity": min(self.capacity.partials, MAX_PRODUCT),
        }
        self.launch = gpu.loaded(PlanSpec(), enable_pdl=False).bind(static, LENGTH_FIELDS, MEMORY_FIELDS)

    def placed(self, lengths: DeviceLengths, staging: Staging) -> torch.Tensor:
        """Prepares a launch, and returns the device memory of the records."""
        size = sum(self.records)
        if self.keeps_address:
            staging.fix_capacity(size)
        records, scratch = staging.written_on_device(size, self.scratch[-1], (self.records, self.scratch))
        staging.write(functools.partial(self, lengths, records, scratch))
        return records

    def __call__(self, lengths: DeviceLengths, records: torch.Tensor, scratch: torch.Tensor) -> None:
        """Launches the kernel on the current stream. `records`, `scratch`: memory of as many numbers, zeros before the
        first launch.
        """
        indptrs = lengths.qo_indptr, lengths.kv_indptr, lengths.last_page_len
        addresses = [0 if x is None else x.data_ptr() for x in indptrs]
        items, kept = records.data_ptr(), scratch.data_ptr()
        memory = items, items + 4 * self.records[0], *(kept + 4 * start for start in self.scratch[:-1])
        of_lengths = *addresses, lengths.q_len or 0, lengths.kv_end
        self.launch.fire(current_stream(self.device_index), of_lengths, ((1, 1, 1), memory))
