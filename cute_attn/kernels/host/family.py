"""Interface of a kernel family to dispatch: fa2, fa3 and fa4 are a `TiledFamily`, and xqa has the same methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from cute_attn.kernels.combine.spec import rows_of_warps
from cute_attn.kernels.host.batch import BatchRun, BatchSchedule, Launched, Memory, Tiling
from cute_attn.kernels.host.features import batched, combine_spec
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.operands import OptionalBounds
from cute_attn.kernels.host.planner import Planner, Room
from cute_attn.kernels.host.prepared import Grid, PreparedKernel, combine_launches, prepared
from cute_attn.kernels.host.single import Scheduler, SingleRun, SingleSchedule
from cute_attn.kernels.rules import Rule
from cute_attn.problem import NO_LENGTHS, BatchLengths, BatchLimits, Features, Lengths, Problem, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Values
from cute_attn.runtime.spec import KernelSpec
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.batch import Size, size_of
from cute_attn.schedule.records import ITEM_INTS
from cute_attn.schedule.split_kv import Split, ceil_div, split_kv, visible_tokens

KernelLaunch = tuple[KernelSpec, Grid]

T = TypeVar("T")  # a family's tile


class TiledFamily(Generic[T]):
    """A family with one attention kernel per tile, and a combine kernel where keys are split: fa2, fa3 and fa4, which
    define the first methods. Methods that take `arch` and `sms`, the number of multiprocessors, instead of a `Gpu` work
    on machines without a GPU.
    """

    name: str
    kernel: Callable[[Settings, Any, int, OptionalBounds | None, Gpu], PreparedKernel]
    # ^ from the spec, and the number of query heads whose rows share a tile

    def specs(self, features: Features, arch: Arch) -> list[KernelSpec]:
        """Returns every kernel that calls of these features may need, whatever their lengths."""
        raise NotImplementedError

    def spec(self, settings: Settings, tile: T, split: bool) -> KernelSpec:
        """Returns the kernel that solves problems of these settings with this tile. `split`: the CTAs of a single
        request write partials; whether those of a batch do is in its records.
        """
        raise NotImplementedError

    def tiling(self, settings: Settings, size: Size, arch: Arch, sms: int) -> Tiling[T]:
        """Returns the tiling of a launch: few tilings serve all lengths."""
        raise NotImplementedError

    def rule_of(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> Rule[Any]:
        """Return the rule by which requests take their kernel."""
        return self.tiling(settings, size_of(lengths, limits), arch, sms).rule

    def request_launch(
        self, settings: Settings, tiling: Tiling[T], split: Split, qo_len: int, kv_len: int
    ) -> tuple[Grid, Values]:
        """Returns the grid of a single request, and the numbers of its kernel."""
        raise NotImplementedError

    def scheduler(self, settings: Settings, arch: Arch, sms: int) -> Scheduler[T]:
        """Returns what schedules single requests of these settings."""
        return functools.partial(self._schedule_request, settings, arch, sms)

    def _schedule_request(
        self, settings: Settings, arch: Arch, sms: int, qo_len: int, kv_len: int
    ) -> SingleSchedule[T]:
        tiling, features = self.tiling(settings, Size(qo_len, kv_len, qo_len, 0), arch, sms), settings.features
        rows, cols, heads, head_blocks, causal, window_left, resident_ctas, min_split_tiles, *_ = tiling.params
        tokens = (rows - 1) // heads + 2  # that one query tile can touch
        visible = visible_tokens(qo_len, kv_len, tokens, causal, window_left)
        query_tiles, kv_tiles = ceil_div(qo_len * heads, rows) * head_blocks, ceil_div(kv_len, cols)
        split = split_kv(kv_tiles, ceil_div(visible, cols), query_tiles, resident_ctas, min_split_tiles)
        parts, launch = split.num_splits, self.request_launch(settings, tiling, split, qo_len, kv_len)
        partial_bytes = qo_len * features.num_qo_heads * parts * 4 * (features.head_dim_vo + 1) if parts > 1 else 0
        return SingleSchedule(tiling.tile, heads, parts, *launch, partial_bytes)

    def loaded(self, settings: Settings, tile: T, heads: int, merges: bool, gpu: Gpu) -> PreparedKernel:
        """Returns the prepared kernel of a tile. `merges`: whether a combine launch follows."""
        spec = self.spec(settings, tile, split=merges and not batched(settings.features))
        return self.kernel(settings, spec, heads, combine_launches(settings, heads, gpu) if merges else None, gpu)

    def prepare(self, settings: Settings, gpu: Gpu) -> SingleRun[T]:
        """Returns a callable that runs single requests of these settings."""
        scheduler = self.scheduler(settings, gpu.arch, gpu.sms)
        return SingleRun(settings, gpu, scheduler, lambda *tile: prepared(self.loaded, settings, *tile, gpu))

    def launches(self, problem: Problem, arch: Arch, sms: int) -> list[KernelLaunch]:
        """Returns kernels and grids of a single request."""
        if problem.qo_len == 0:
            return []
        schedule = self.scheduler(problem.settings, arch, sms)(problem.qo_len, problem.kv_len)
        split = schedule.num_splits > 1
        attention = self.spec(problem.settings, schedule.tile, split), schedule.grid
        rows = rows_of_warps(problem.qo_len * problem.settings.features.num_qo_heads, sms)
        combine = combine_spec(problem.settings.features), rows.grid
        return [attention, combine] if split else [attention]

    def schedule(
        self,
        settings: Settings,
        lengths: Lengths,
        limits: BatchLimits,
        arch: Arch,
        sms: int,
        before: BatchSchedule[T] | None = None,
    ) -> BatchSchedule[T] | None:
        """Returns the launches of a batch, those of `before` if they are the same; None where lengths on the device
        might need more than the planner kernel, or the workspace, has room for.
        """
        known = lengths if isinstance(lengths, BatchLengths) else None
        tiling = self.tiling(settings, size_of(known or NO_LENGTHS, limits), arch, sms)
        room = Room.bounded(tiling.params, limits) if known is None else Room.of(known, tiling.params, limits)
        if before is not None and before.tiling is tiling and before.room == room:
            return before
        return None if room is None else BatchSchedule.of(tiling, room, sms)

    def plan(
        self, settings: Settings, lengths: Lengths, limits: BatchLimits, staging: Staging, gpu: Gpu
    ) -> SplitKvBatchRun[T] | None:
        """Returns a callable that runs batches of these settings and lengths; None: `schedule`."""
        schedule = self.schedule(settings, lengths, limits, gpu.arch, gpu.sms)
        return None if schedule is None else SplitKvBatchRun(self, settings, lengths, limits, staging, gpu, schedule)

    def batch_launches(
        self, settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
    ) -> tuple[BatchSchedule[T] | None, list[KernelLaunch]]:
        """Returns the schedule of a batch, and kernels and grids."""
        schedule = self.schedule(settings, lengths, limits, arch, sms)
        assert schedule is not None  # of lengths on the host
        attention = self.spec(settings, schedule.tiling.tile, False), schedule.grid
        combine = combine_spec(settings.features), schedule.combine.grid
        return schedule, [launch for launch in (attention, combine) if launch[1][0]]


class SplitKvBatchRun(BatchRun, Generic[T]):
    """Runs batches whose keys are split by the schedule, with a combine launch after the attention launch."""

    def __init__(
        self,
        family: TiledFamily[T],
        settings: Settings,
        lengths: Lengths,
        limits: BatchLimits,
        staging: Staging,
        gpu: Gpu,
        schedule: BatchSchedule[T],
    ) -> None:
        super().__init__(settings, gpu)
        self.family, self.limits, self.staging = family, limits, staging
        self._kernel(schedule, settings)
        self._follow(schedule, lengths)

    def _follow(self, schedule: BatchSchedule[T], lengths: Lengths) -> None:
        """Makes the launches those of a schedule, which the planner kernel is to write."""
        planner = prepared(Planner, schedule.tiling.params, self.settings.page_size, self.gpu)
        self.lengths = lengths  # a captured graph reads those on the device
        self.records = planner.placed(lengths, schedule.room, self.staging, self.limits.keeps_address)
        self.schedule = self.version = schedule  # a room that is the same has its records where they were

    def kernel(self, settings: Settings) -> PreparedKernel:
        return self._kernel(self.schedule, settings)

    def _kernel(self, schedule: BatchSchedule[T], settings: Settings) -> PreparedKernel:
        tiling = schedule.tiling
        tile, heads = tiling.tile, tiling.params.group_size
        return prepared(self.family.loaded, settings.unscaled, tile, heads, schedule.merges, self.gpu)

    def again(self, lengths: Lengths) -> bool | None:
        """Replaces the lengths of the requests. Returns whether the kernels are the same; None, and nothing is
        replaced, if the host does not know the lengths.
        """
        if not (isinstance(self.lengths, BatchLengths) and isinstance(lengths, BatchLengths)):
            return None
        before = self.schedule
        now = self.family.schedule(self.settings, lengths, self.limits, self.gpu.arch, self.gpu.sms, before)
        assert now is not None  # of lengths on the host
        same_kernel = now.tiling is before.tiling and now.merges == before.merges
        if not same_kernel:
            self._kernel(now, self.settings)  # before records are replaced: it may be missing
        self._follow(now, lengths)
        return same_kernel

    def decided(self, memory: Memory) -> Launched:
        """Returns grids, and values of the tile order fields, `params.batch_fields` and the combine kernel's
        MERGE_FIELDS.
        """
        pages, _, workspace = memory
        schedule, (records, uploaded) = self.schedule, self.records
        items, params = records.data_ptr(), schedule.tiling.params
        o = workspace if schedule.merges else 0
        partials = o, o + schedule.partial_o_bytes
        key_bounds = (uploaded.data_ptr(),) if self.settings.features.multi_item else ()
        numbers = *schedule.order, items, *partials, pages, *key_bounds
        merge_items = items + 4 * ITEM_INTS * schedule.room.capacity.items
        combine_grid, *rows = schedule.combine
        merges = *rows, merge_items, schedule.rows_per_merge, params.rows
        return Launched(schedule, memory, schedule.grid, numbers, combine_grid, merges, partials)
