"""Interface of a kernel family to dispatch: fa2, fa3 and fa4 are a `TiledFamily`, and xqa has the same methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from cute_attn.kernels.combine.spec import rows_of_warps
from cute_attn.kernels.host.batch import BatchSchedule, SplitKvBatchRun, Tiling, uploaded
from cute_attn.kernels.host.features import combine_spec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.planner import Planner, refusal
from cute_attn.kernels.host.prepared import Grid, PreparedKernel, prepared
from cute_attn.kernels.host.single import RequestLaunch, Scheduler, SingleRun, SingleSchedule, schedule_request
from cute_attn.problem import (
    NO_LENGTHS,
    BatchLengths,
    BatchLimits,
    DeviceLengths,
    Features,
    Problem,
    Settings,
)
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule.batch import AllocateInts, Size, WorkList, allocate_ints, size_of

KernelLaunch = tuple[KernelSpec, Grid]

T = TypeVar("T")  # a family's tile


@dataclass(frozen=True)
class TiledFamily(Generic[T]):
    """A family with one attention kernel per tile, and a combine kernel where keys are split: fa2, fa3 and fa4. Methods
    that take `arch` and `sms`, the number of multiprocessors, instead of a `Gpu` work on machines without a GPU.
    """

    name: str
    specs: Callable[[Features, Arch], list[KernelSpec]]  # all that calls of these features may need
    spec: Callable[[Settings, T, bool], KernelSpec]  # from a tile, and whether a single request's keys are split
    tiling: Callable[[Settings, Size, Arch, int], Tiling[T]]
    request_launch: RequestLaunch[T]
    kernel: Callable[[Settings, T, int, bool, Gpu], PreparedKernel]
    # ^ loaded, for a tile, its heads, and whether partials are combined

    def scheduler(self, settings: Settings, arch: Arch, sms: int) -> Scheduler[T]:
        """Returns what schedules single requests of these settings."""

        def scheduled(qo_len: int, kv_len: int) -> SingleSchedule[T]:
            tiling = self.tiling(settings, Size(qo_len, kv_len, qo_len, 0), arch, sms)
            return schedule_request(settings, tiling, self.request_launch, qo_len, kv_len)

        return scheduled

    def prepare(self, settings: Settings, gpu: Gpu) -> SingleRun[T]:
        """Returns a callable that runs single requests of these settings."""
        scheduler = self.scheduler(settings, gpu.arch, gpu.sms)
        return SingleRun(settings, gpu, scheduler, lambda *tile: prepared(self.kernel, settings, *tile, gpu))

    def launches(self, problem: Problem, arch: Arch, sms: int) -> list[KernelLaunch]:
        """Returns kernels and grids of a single request."""
        if problem.qo_len == 0:
            return []
        schedule = self.scheduler(problem.settings, arch, sms)(problem.qo_len, problem.kv_len)
        split = schedule.num_splits > 1
        attention = self.spec(problem.settings, schedule.tile, split), schedule.grid
        rows = rows_of_warps(problem.qo_len * problem.features.num_qo_heads, sms)
        combine = combine_spec(problem.features), rows.grid
        return [attention, combine] if split else [attention]

    def schedule(
        self,
        settings: Settings,
        lengths: BatchLengths,
        limits: BatchLimits,
        arch: Arch,
        sms: int,
        allocate: AllocateInts = allocate_ints,
    ) -> BatchSchedule[T]:
        """Returns the schedule of a batch, with records from `allocate`."""
        tiling = self.tiling(settings, size_of(lengths, limits), arch, sms)
        work = batch_schedule.schedule(lengths, tiling.params, limits, allocate)
        return BatchSchedule.of(tiling, work, lengths, limits, sms)

    def plan(
        self,
        settings: Settings,
        lengths: BatchLengths | DeviceLengths,
        limits: BatchLimits,
        staging: Staging,
        gpu: Gpu,
    ) -> SplitKvBatchRun | None:
        """Returns a callable that runs batches of these settings and lengths; None where the planner kernel cannot
        schedule every batch within `limits.graph`, and the lengths are on the device.
        """
        kernel_of = functools.partial(self._kernel_of, gpu)
        if isinstance(lengths, DeviceLengths):
            tiling = self.tiling(settings, size_of(NO_LENGTHS, limits), gpu.arch, gpu.sms)
            if refusal(tiling.params, limits) is not None:
                return None
            planner = Planner(tiling.params, limits, settings.page_size, gpu)
            work = WorkList(0, planner.capacity.items, planner.capacity.merges, np.empty(0, np.int32))
            schedule = BatchSchedule.of(tiling, work, NO_LENGTHS, limits, gpu.sms)
            planned = lambda _: schedule, kernel_of, lambda _: planner.placed(lengths, staging)
            return SplitKvBatchRun(settings, lengths, *planned, gpu.device_index)

        def scheduled(lengths: BatchLengths) -> BatchSchedule[T]:
            return self.schedule(settings, lengths, limits, gpu.arch, gpu.sms, staging.reserve)

        def placed(schedule: BatchSchedule[T]) -> torch.Tensor:
            return uploaded(schedule.work.ints, limits, staging)

        return SplitKvBatchRun(settings, lengths, scheduled, kernel_of, placed, gpu.device_index)

    def _kernel_of(self, gpu: Gpu, schedule: BatchSchedule[T]) -> Callable[[Settings], PreparedKernel]:
        """Returns the prepared kernel of a schedule, by settings."""
        tile, heads, merges = schedule.tiling.tile, schedule.tiling.params.group_size, schedule.merges
        return lambda settings: prepared(self.kernel, settings, tile, heads, merges, gpu)

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[BatchSchedule[T], list[KernelLaunch]]:
        """Returns the schedule of a batch, and kernels and grids."""
        schedule = self.schedule(settings, lengths, limits, arch, sms)
        attention = self.spec(settings, schedule.tiling.tile, False), schedule.grid
        combine = combine_spec(settings.features), schedule.combine.grid
        return schedule, [launch for launch in (attention, combine) if launch[1][0]]
