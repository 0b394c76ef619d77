"""A kernel family as dispatch sees it: fa2, fa3 and xqa offer the same few functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from cute_attn.kernels.host.batch import BatchRun, BatchSchedule, Repeat
from cute_attn.kernels.host.features import combine_spec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.prepared import Grid, PreparedKernel
from cute_attn.kernels.host.single import Scheduler, SingleRun
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Features, Problem, Request, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule import batch as batch_schedule

KernelLaunch = tuple[KernelSpec, Grid]

T = TypeVar("T")  # a family's tile
T_co = TypeVar("T_co", covariant=True)


class BatchRunner(Protocol):
    """Runs batches of one plan."""

    @property
    def records(self) -> torch.Tensor:
        """What launches read of the plan."""

    def __call__(self, problem: BatchProblem) -> None: ...

    def repeat(self, problem: BatchProblem) -> Repeat:
        """Runs like that of `problem`, but for addresses."""


class KernelFamily(Protocol):
    """Host code of the kernels behind one backend. Methods that take `arch` and `sms`, the multiprocessors, instead of
    a `Gpu` need none.
    """

    @property
    def name(self) -> str: ...

    def specs(self, features: Features, arch: Arch) -> list[KernelSpec]:
        """Every kernel that calls of these features may need, whatever their lengths."""

    def prepare(self, settings: Settings, gpu: Gpu) -> Callable[[Request], None]:
        """What runs single requests of these settings."""

    def launches(self, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
        """Kernels and grids of a single request."""

    def plan(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging, gpu: Gpu
    ) -> BatchRunner:
        """What runs batches of these settings and lengths. `staging` carries the records to the device."""

    def workspace(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[int, int]:
        """Bytes that a plan uses of a workspace of any size, and bytes of its records."""

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[BatchSchedule[object] | None, list[KernelLaunch]]:
        """The schedule of a batch (None: CTAs share all keys equally), kernels and grids."""


class ScheduleBatch(Protocol[T_co]):
    """The schedule of a batch for a GPU of `arch` with `sms` multiprocessors, in records from `memory`."""

    def __call__(
        self,
        settings: Settings,
        lengths: BatchLengths,
        limits: BatchLimits,
        arch: Arch,
        sms: int,
        memory: batch_schedule.Memory = batch_schedule.new_ints,
    ) -> BatchSchedule[T_co]: ...


@dataclass(frozen=True)
class TiledFamily(Generic[T]):
    """A family with one attention kernel per tile, and a combine kernel where keys are split: fa2 and fa3."""

    name: str
    specs: Callable[[Features, Arch], list[KernelSpec]]
    spec: Callable[[Settings, T, bool], KernelSpec]  # from a tile, and whether a single request's keys are split
    scheduler: Callable[[Settings, Arch, int], Scheduler[T]]
    schedule: ScheduleBatch[T]
    kernel: Callable[[Settings, T, int, bool, Gpu], PreparedKernel]  # from a tile, its heads, and whether partials
    # ^ are combined

    def prepare(self, settings: Settings, gpu: Gpu) -> SingleRun[T]:
        def kernel(tile: T, heads: int, split: bool) -> PreparedKernel:
            return self.kernel(settings, tile, heads, split, gpu)

        return SingleRun(settings, gpu.device_index, self.scheduler(settings, gpu.arch, gpu.sms), kernel)

    def launches(self, problem: Request, arch: Arch, sms: int) -> list[KernelLaunch]:
        assert isinstance(problem, Problem)  # selection refuses lengths on the device
        if problem.qo_len == 0:
            return []
        schedule = self.scheduler(problem.settings, arch, sms)(problem.qo_len, problem.kv_len)
        split = schedule.num_splits > 1
        attention = self.spec(problem.settings, schedule.tile, split), schedule.grid
        combine = combine_spec(problem.features), (problem.qo_len * problem.features.num_qo_heads, 1, 1)
        return [attention, combine] if split else [attention]

    def plan(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging, gpu: Gpu
    ) -> BatchRun[T]:
        schedule = self.schedule(settings, lengths, limits, gpu.arch, gpu.sms, staging.reserve)
        return self.batch_run(settings, schedule, staging, gpu)

    def batch_run(self, settings: Settings, schedule: BatchSchedule[T], staging: Staging, gpu: Gpu) -> BatchRun[T]:
        """Runs of a schedule."""
        tile, heads, merges = schedule.tile, schedule.shape.group, schedule.merges

        def kernel(settings: Settings) -> PreparedKernel:
            return self.kernel(settings, tile, heads, merges, gpu)

        return BatchRun(settings, schedule, kernel, staging, gpu.device_index)

    def workspace(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[int, int]:
        limits = limits._replace(workspace_bytes=batch_schedule.UNLIMITED)
        return self.schedule(settings, lengths, limits, arch, sms).workspace()

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[BatchSchedule[T], list[KernelLaunch]]:
        schedule = self.schedule(settings, lengths, limits, arch, sms)
        attention = self.spec(settings, schedule.tile, False), schedule.grid
        combine = combine_spec(settings.features), schedule.combine_grid
        return schedule, [launch for launch in (attention, combine) if launch[1][0]]
