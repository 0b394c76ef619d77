"""Batches: the launches that a schedule needs, and runs of one plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cute_attn.kernels.host.params import Values
from cute_attn.kernels.host.prepared import Grid, PreparedKernel
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime.launch import current_stream
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule.batch import TileShape, Work
from cute_attn.schedule.records import ITEM_INTS

Tensors = tuple[torch.Tensor | None, ...]  # q, k, v, out, lse, or what holds them
Repeat = Callable[[int, int, int, int, int, Tensors], None]  # a run with other addresses of q, k, v, out and lse

COMBINE_CTAS = 16  # CTAs of 128 threads resident per SM: a larger grid only starts and ends where few rows are merged
MAX_SETTINGS = 256  # settings of the layers of a model, for which tilings and prepared kernels are kept

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)  # a family's tile


@dataclass
class BatchSchedule(Generic[T_co]):
    """What a plan fixes for its runs."""

    tile: T_co
    shape: TileShape
    work: Work
    total_tiles: int  # work items times blocks of heads
    grid: Grid
    combine_grid: Grid
    rows_per_merge: int
    rows_to_merge: int  # of all merge records and blocks of heads
    slots: int  # partials that the workspace has room for
    fixed: bool  # records keep their address over plans (CUDA graphs)
    numbers: Values  # of the kernel's schedule fields

    @property
    def merges(self) -> bool:
        """Whether a combine launch follows."""
        return bool(self.combine_grid[0])

    def workspace(self) -> tuple[int, int]:
        """Bytes of the workspace in use, and bytes of the records."""
        return self.work.num_partials * batch_schedule.slot_bytes(self.shape), self.work.ints.nbytes


def schedule(
    tiling: tuple[T, TileShape],
    lengths: BatchLengths,
    limits: BatchLimits,
    memory: batch_schedule.Memory,
    sms: int,
    *,
    max_ctas: int = batch_schedule.UNLIMITED,
    numbers: Callable[[TileShape, Work], Values] | None = None,
) -> BatchSchedule[T]:
    """The schedule of a batch. `max_ctas`: of a persistent kernel, the CTAs that run at once. `numbers`: values of the
    kernel's schedule fields, if it has any.
    """
    tile, shape = tiling
    work = batch_schedule.schedule(lengths, shape, limits, memory)
    rows_per_merge = min(shape.rows, batch_schedule.longest_request(lengths, limits) * shape.group)
    total, to_merge = work.item_capacity * shape.num_kv_heads, work.merge_capacity * shape.num_kv_heads * rows_per_merge
    return BatchSchedule(
        tile,
        shape,
        work,
        total,
        (min(total, max_ctas), 1, 1),
        (to_merge if limits.graph is None else min(to_merge, sms * COMBINE_CTAS), 1, 1),
        rows_per_merge,
        to_merge,
        limits.workspace_bytes // batch_schedule.slot_bytes(shape),
        limits.graph is not None,
        numbers(shape, work) if numbers else (),
    )


class BatchRun(Generic[T]):
    """Runs batches of one plan. `settings` of a run may differ from the planned ones in numbers and in what these
    make of the scores: `kernel` prepares the kernels of such settings.
    """

    def __init__(
        self,
        settings: Settings,
        schedule: BatchSchedule[T],
        kernel: Callable[[Settings], PreparedKernel],
        staging: Staging,
        device_index: int,
    ) -> None:
        self.schedule, self.kernel, self.device_index = schedule, kernel, device_index
        self.prepared = kernel(settings)  # first: where a kernel is missing, the plan before keeps its records
        work, shape = schedule.work, schedule.shape
        if schedule.fixed:
            staging.fixed_capacity(work.ints.size)
        self.records = staging.upload(work.ints)
        self.items = self.records.data_ptr()
        self.merges = (
            self.items + 4 * ITEM_INTS * work.item_capacity,
            schedule.rows_per_merge,
            shape.rows,
            schedule.rows_to_merge,
        )
        self.partial_bytes = schedule.slots * shape.num_kv_heads * shape.rows * (shape.partial_row_bytes - 4)

    def __call__(self, problem: BatchProblem) -> None:
        schedule = self.schedule
        if not schedule.grid[0]:
            return
        if problem.settings is not self.prepared.settings:
            self.prepared = self.kernel(problem.settings)
        prepared, stream = self.prepared, current_stream(self.device_index)
        target, partials = prepared.output.of(problem), self.partials(problem)
        numbers = self.numbers(problem, partials)
        prepared.attention.fire(prepared.values(problem, target, numbers, stream), schedule.grid, stream)
        if prepared.combine is not None:
            values = prepared.combine.values(target, partials, self.merges)
            prepared.combine.launch.fire(values, schedule.combine_grid, stream)

    def partials(self, problem: BatchProblem) -> tuple[int, int]:
        """Addresses of partial outputs and lse."""
        if not self.schedule.merges:
            return 0, self.partial_bytes
        assert problem.workspace is not None
        o = problem.workspace.data_ptr()
        return o, o + self.partial_bytes

    def numbers(self, problem: BatchProblem, partials: tuple[int, int]) -> Values:
        """Values of the kernel's schedule fields and BATCH_FIELDS."""
        indices = problem.kv_indices
        return *self.schedule.numbers, self.items, *partials, 0 if indices is None else indices.data_ptr()

    def repeat(self, problem: BatchProblem) -> Repeat:
        """Runs like that of `problem`, but for addresses."""
        prepared, grid, index = self.kernel(problem.settings), self.schedule.grid, self.device_index
        if not grid[0]:
            return launch_nothing
        target, partials = prepared.output.of(problem), self.partials(problem)
        first = prepared.values(problem, target, self.numbers(problem, partials), current_stream(index))
        values = prepared.replay(problem, first)
        attention, combine = prepared.attention, prepared.combine
        if combine is None:

            def run(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
                stream = current_stream(index)
                attention.fire(values(q, k, v, out, lse, stream), grid, stream)

            return run
        merge, combine_grid = combine.launch, self.schedule.combine_grid
        merge_values = combine.rebinder.bind(combine.values(target, partials, self.merges))

        def run_and_combine(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
            stream = current_stream(index)
            attention.fire(values(q, k, v, out, lse, stream), grid, stream)
            merge.fire(merge_values(out, lse), combine_grid, stream)

        return run_and_combine


def launch_nothing(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
    """A run of a batch without query tokens."""
