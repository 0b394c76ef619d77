"""What the batch kernels' host sides share: how they plan, sizes of a plan's launches, and runs of it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime.arch import Arch, for_device, multiprocessors
from cute_attn.runtime.launch import Launch, current_stream
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule.batch import TileShape, Work
from cute_attn.schedule.records import ITEM_INTS

Grid = tuple[int, int, int]
Values = tuple[Any, ...]  # of a kernel's parameters, in order
Tensors = tuple[torch.Tensor | None, ...]  # q, k, v, out, lse, or what holds them
Repeat = Callable[[int, int, int, int, int, Tensors], None]  # a run with other addresses of q, k, v, out and lse
COMBINE_CTAS = 16  # of 128 threads, that an SM holds: more only start and end where few rows are to be merged
REMEMBERED = 256  # settings of the layers of a model

S = TypeVar("S")  # a backend's schedule


@dataclass(frozen=True)
class Batches(Generic[S]):
    """What a backend offers for batches (`dispatch.backends`), made of its own three parts."""

    scheduled: Callable[..., S]  # from settings, lengths, limits, arch, multiprocessors, and memory for the records
    planned: Callable[[Settings, S, Staging, Arch, int], Callable[[BatchProblem], None]]
    sizes: Callable[[S], tuple[int, int]]  # bytes of the workspace that a schedule uses, and bytes of its records

    def plan(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging
    ) -> Callable[[BatchProblem], None]:
        index = settings.features.device.index
        arch = for_device(index)
        made = self.scheduled(settings, lengths, limits, arch, multiprocessors(index), staging.reserve)
        return self.planned(settings, made, staging, arch, index)

    def workspace(self, settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
        """`sizes` of a plan that may use as much of the workspace as it likes."""
        index = settings.features.device.index
        return self.workspace_on(settings, lengths, limits, for_device(index), multiprocessors(index))

    def workspace_on(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[int, int]:
        """`workspace` of a GPU of `arch` with `sms` multiprocessors."""
        limits = limits._replace(workspace_bytes=batch_schedule.UNLIMITED)
        return self.sizes(self.scheduled(settings, lengths, limits, arch, sms))


class Scheduled(NamedTuple):
    """What a plan fixes for its runs."""

    tile: Tile | HopperTile
    shape: TileShape
    work: Work
    total: int  # work items times blocks of heads
    grid: Grid
    combine_grid: Grid
    rows_per_merge: int
    rows_to_merge: int  # of all merge records and blocks of heads
    slots: int  # room for partials
    fixed: bool  # in memory that later plans use too


def scheduled(
    tile: Tile | HopperTile,
    shape: TileShape,
    lengths: BatchLengths,
    limits: BatchLimits,
    memory: batch_schedule.Memory,
    sms: int,
    most_ctas: int = batch_schedule.UNLIMITED,
) -> Scheduled:
    """`most_ctas`: where CTAs draw their work, as many as run at once."""
    work = batch_schedule.schedule(lengths, shape, limits, memory)
    rows_per_merge = min(shape.rows, batch_schedule.longest_request(lengths, limits) * shape.group)
    total, to_merge = work.item_capacity * shape.num_kv_heads, work.merge_capacity * shape.num_kv_heads * rows_per_merge
    merging = to_merge if limits.graph is None else min(to_merge, sms * COMBINE_CTAS)
    return Scheduled(
        tile,
        shape,
        work,
        total,
        (min(total, most_ctas), 1, 1),
        (merging, 1, 1),
        rows_per_merge,
        to_merge,
        limits.workspace_bytes // batch_schedule.slot_bytes(shape),
        limits.graph is not None,
    )


def sizes(plan: Scheduled) -> tuple[int, int]:
    """Bytes of the workspace that a plan uses, and bytes of its records."""
    return plan.work.num_partials * batch_schedule.slot_bytes(plan.shape), plan.work.ints.nbytes


class Ready(NamedTuple):
    """What runs of one settings share."""

    settings: Settings
    parameters: Any  # of the backend
    launch: Launch
    combine: Launch | None


class Planned(abc.ABC):
    """Runs batches of one plan. `settings` of a run may differ from the planned ones in numbers and in what these
    make of the scores.
    """

    def __init__(self, settings: Settings, plan: Scheduled, staging: Staging, arch: Arch, device_index: int) -> None:
        self.plan, self.arch, self.device_index = plan, arch, device_index
        self.ready = self.prepared(settings)  # first: where a kernel is missing, the plan before keeps its records
        ints, shape = plan.work.ints, plan.shape
        if plan.fixed:
            staging.fixed_capacity(ints.size)
        self.records = staging.upload(ints)
        self.items = self.records.data_ptr()
        self.merges = (
            self.items + 4 * ITEM_INTS * plan.work.item_capacity,
            plan.rows_per_merge,
            shape.rows,
            plan.rows_to_merge,
        )
        self.partial_bytes = plan.slots * shape.num_kv_heads * shape.rows * (shape.partial_row_bytes - 4)

    @abc.abstractmethod
    def prepared(self, settings: Settings) -> Ready:
        """Loaded kernels and parameters of runs with these settings."""

    @abc.abstractmethod
    def attention(self, ready: Ready, problem: BatchProblem, partials: tuple[int, int], stream: int) -> Values:
        """Parameters of the first launch."""

    @abc.abstractmethod
    def again(
        self, ready: Ready, problem: BatchProblem, values: Values
    ) -> Callable[[int, int, int, int, int, int], Values]:
        """From addresses of q, k, v, out and lse and a stream to parameters of a launch that had `values`."""

    def __call__(self, problem: BatchProblem) -> None:
        plan = self.plan
        if not plan.grid[0]:
            return
        if problem.settings is not self.ready.settings:
            self.ready = self.prepared(problem.settings)
        ready, stream = self.ready, current_stream(self.device_index)
        partials = self.partials(problem)
        ready.launch.fire(self.attention(ready, problem, partials, stream), plan.grid, stream)
        if ready.combine is not None:
            ready.combine.fire(self.merging(ready, problem, partials), plan.combine_grid, stream)

    def partials(self, problem: BatchProblem) -> tuple[int, int]:
        """Addresses of outputs and lse."""
        o = 0 if self.ready.combine is None else problem.workspace.data_ptr()  # type: ignore[union-attr]
        return o, o + self.partial_bytes

    def merging(self, ready: Ready, problem: BatchProblem, partials: tuple[int, int]) -> Values:
        """Parameters of the combine launch."""
        parameters = ready.parameters
        values: Values = parameters.combine(parameters.target(problem), partials, (0, 0), self.merges)
        return values

    def repeat(self, problem: BatchProblem) -> Repeat:
        """Runs like that of `problem`, but for addresses."""
        ready, grid, index = self.prepared(problem.settings), self.plan.grid, self.device_index
        if not grid[0]:
            return nothing
        partials, stream = self.partials(problem), current_stream(index)
        launch, combine = ready.launch, ready.combine
        values = self.again(ready, problem, self.attention(ready, problem, partials, stream))
        if combine is None:

            def run(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
                stream = current_stream(index)
                launch.fire(values(q, k, v, out, lse, stream), grid, stream)

            return run
        combine_grid = self.plan.combine_grid
        o_partial, lse_partial, _, _, *rest = self.merging(ready, problem, partials)

        def run_and_combine(q: int, k: int, v: int, out: int, lse: int, _: Tensors) -> None:
            stream = current_stream(index)
            launch.fire(values(q, k, v, out, lse, stream), grid, stream)
            combine.fire((o_partial, lse_partial, out, lse, *rest), combine_grid, stream)

        return run_and_combine


def nothing(q: int, k: int, v: int, out: int, lse: int, tensors: Tensors) -> None:
    """A batch without query tokens."""
