"""Batches: the schedule of a plan, and runs of one plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cute_attn.kernels.combine.spec import RowsOfWarps, rows_of_warps
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import Fire, Runner, block_scale_strides, launch_nothing, optional_tensors
from cute_attn.kernels.host.planner import Room
from cute_attn.kernels.host.prepared import Grid, PreparedKernel, output_strides, prepared
from cute_attn.kernels.rules import Rule
from cute_attn.problem import BatchProblem, Settings
from cute_attn.runtime.launch import Settled, Values, current_stream
from cute_attn.schedule.params import SchedulerParams
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS

Tensors = tuple[Any, ...]  # q, k, v, out, lse, a tuple of `operands.Optional`; kv_indices and workspace of the plan in
# ^ force

T_co = TypeVar("T_co", covariant=True)  # a family's tile


@dataclass(frozen=True, eq=False)  # families make them by `prepared`: equal ones are one object
class Tiling(Generic[T_co]):
    """A family's tile for a batch, the parameters of the scheduler, and how the kernel takes its tiles."""

    tile: T_co
    rule: Rule[Any]  # by which it was chosen
    params: SchedulerParams
    ctas: int = 1  # of a group, which share tiles
    order: Callable[[SchedulerParams, int, int], Values] | None = None
    # ^ of a persistent kernel, which has as many groups of CTAs as run at once: values of the tile order fields


@dataclass
class BatchSchedule(Generic[T_co]):
    """Launches of a batch with one work item per query tile and split, whatever the planner kernel finds that fits the
    room: fa2, fa3 and fa4.
    """

    tiling: Tiling[T_co]
    room: Room
    grid: Grid  # of the attention kernel
    rows_per_merge: int
    combine: RowsOfWarps  # all rows of all merge records and blocks of heads
    partial_o_bytes: int  # of all partials that the workspace has room for
    order: Values  # of the kernel's tile order fields

    @classmethod
    def of(cls, tiling: Tiling[T_co], room: Room, sms: int) -> BatchSchedule[T_co]:
        """Returns the schedule with launches for what there is room for."""
        params, (items, merges, partials) = tiling.params, room.capacity
        most = room.sizes.max_rows if room.sizes.max_qo_len is None else room.sizes.max_qo_len
        rows_per_merge = min(params.rows, most * params.group_size)
        total = items * params.num_kv_heads
        groups = min(total, params.resident_ctas) if tiling.order else total
        return cls(
            tiling,
            room,
            grid=(tiling.ctas * groups, 1, 1),
            rows_per_merge=rows_per_merge,
            combine=rows_of_warps(merges * params.num_kv_heads * rows_per_merge, sms, exist=False),
            partial_o_bytes=partials * params.num_kv_heads * params.rows * (params.partial_row_bytes - 4),  # no lse
            order=tiling.order(params, items, 0 if room.chunk else merges) if tiling.order else (),
        )

    @property
    def merges(self) -> bool:
        """True if a combine launch follows."""
        return bool(self.combine.num_rows)

    def workspace(self) -> tuple[int, int]:
        """Returns the most bytes of the workspace that may be in use, and the bytes of the records."""
        items, merges, partials = self.room.capacity
        return min(items, partials) * self.tiling.params.partial_bytes, 4 * (items * ITEM_INTS + merges * MERGE_INTS)


Memory = tuple[int, int, int]  # address and number of page indices, and address of the workspace


class Launched(NamedTuple):
    """What a plan decides of its launches, and the memory for which it does."""

    version: object  # of the `BatchRun`
    memory: Memory
    grid: Grid
    numbers: Values  # of the attention kernel
    combine_grid: Grid
    merges: Values  # numbers of the combine kernel
    partials: Values  # addresses
    scratch: tuple[int, int, int] = (0, 0, 0)  # addresses of counters and partial results, and the most keys of a
    # ^ request, of kernels that split the keys themselves


class BatchRun(Runner):
    """Runs batches of one plan; subclasses define `kernel` and `decided`."""

    version: object = None  # another one where a later plan changes grids or numbers

    records: tuple[torch.Tensor, ...]  # in device memory, with what is beside them

    def __init__(self, settings: Settings, gpu: Gpu) -> None:
        self.settings, self.gpu = settings, gpu
        self.launched = Launched(self, (0, 0, 0), (0, 1, 1), (), (0, 1, 1), (), ())

    def kernel(self, settings: Settings) -> PreparedKernel:
        """Returns the kernel of a run's settings, which may differ from the planned ones in numbers and in the score
        steps that follow from these.
        """
        raise NotImplementedError

    def decided(self, memory: Memory) -> Launched:
        """Returns what the plan in force decides of launches."""
        raise NotImplementedError

    def bind(self, problem: BatchProblem) -> Fire:
        """Returns a function that launches the attention kernel, and the combine kernel where keys are split."""
        if not problem.q.shape[0]:
            return launch_nothing
        kernel, index, operands = self.kernel(problem.settings), self.gpu.device_index, problem[1:5]
        strides, addresses = kernel.strides(*operands, block_scale_strides(problem)), kernel.addresses(*operands)
        strides = prepared(tuple, strides)  # launches do not write again what is the same object
        scales, (roles, _) = kernel.scales(problem.settings), optional_tensors(problem)
        attention, combine = kernel.attention.of(roles), kernel.combine
        out_strides, v_scale = prepared(tuple, output_strides(problem.out)), scales[1:]
        if combine is not None:
            merge = combine.of(roles)
        counter = kernel.counter
        # The version and the memory of launches, what they settle, the addresses of partial results, and scratch.
        latest: tuple[object, Memory, Settled, Settled, Values, int, int, int] | None = None

        def fire(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
            nonlocal latest
            _, _, _, _, _, optional, kv_indices, workspace = tensors
            pages = entries = 0  # the same tensors may move in place
            if kv_indices is not None:
                pages, entries = kv_indices.data_ptr(), kv_indices.numel()
            memory = pages, entries, 0 if workspace is None else workspace.data_ptr()
            work = latest  # once: threads share this
            if work is None or work[0] is not self.version or work[1] != memory:
                launched = self.launched  # other layers', if they run this plan
                if launched.version is not self.version or launched.memory != memory:
                    launched = self.launched = self.decided(memory)
                version, _, grid, numbers, combine_grid, merges, to_merge, scratch = launched
                settled, to_combine = (grid, strides, numbers, scales), (combine_grid, out_strides, merges, v_scale)
                work = latest = version, memory, settled, to_combine, to_merge, *scratch
            _, _, settled, to_combine, to_merge, counters, partials, most_keys = work
            if not settled[0][0]:
                return
            stream = current_stream(index)
            if counter is not None:
                counters = counter(stream)
            attention.fire(stream, addresses((q, k, v, out, lse, counters, partials, most_keys)), settled, optional)
            if combine is not None:
                merge.fire(stream, (out, lse, *to_merge), to_combine, optional)

        return fire
