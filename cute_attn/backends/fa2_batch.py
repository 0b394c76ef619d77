"""Host side of the mma.sync kernel for batches: the schedule of a plan, and the launches of its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from cute_attn import plan as plans
from cute_attn import plan_batch
from cute_attn.backends.fa2_kernels import combine_spec, load, multiprocessors, spec, variant
from cute_attn.backends.fa2_params import UNBOUNDED, Parameters
from cute_attn.kernels import tiles
from cute_attn.kernels.spec import KernelSpec, Tile
from cute_attn.kernels.work import ITEM_INTS
from cute_attn.plan_batch import TileShape, Work
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime.arch import Arch, for_device
from cute_attn.runtime.launch import Launch, current_stream
from cute_attn.runtime.staging import Staging

Grid = tuple[int, int, int]
REMEMBERED = 256  # settings of the layers of a model


def plan(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, staging: Staging
) -> Callable[[BatchProblem], None]:
    index = settings.features.device.index
    arch = for_device(index)
    launch = scheduled(settings, lengths, limits, arch, multiprocessors(index), staging.reserve)
    return Planned(settings, launch, staging, arch, index)


def workspace(settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    """Bytes of the workspace that a plan uses if it has as many as it likes, and bytes of its records."""
    index = settings.features.device.index
    return workspace_on(settings, lengths, limits, for_device(index), multiprocessors(index))


def workspace_on(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> tuple[int, int]:
    """`workspace` of a GPU of `arch` with `sms` multiprocessors."""
    plan = scheduled(settings, lengths, limits._replace(workspace_bytes=plan_batch.UNLIMITED), arch, sms)
    return plan.work.num_partials * plan.slot_bytes, plan.work.ints.nbytes


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """Kernels and grids of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    main = spec(settings.features, plan.tile), plan.grid
    combine = combine_spec(settings.features), plan.combine_grid
    return [launch for launch in (main, combine) if launch[1][0]]


class Scheduled(NamedTuple):
    """What a plan fixes for its runs."""

    tile: Tile
    work: Work
    grid: Grid
    combine_grid: Grid
    rows_per_merge: int
    slots: int  # room for partials
    slot_bytes: int
    fixed: bool  # in memory that later plans use too


def scheduled(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: plan_batch.Memory = plan_batch.new_ints,
) -> Scheduled:
    features = settings.features
    kind, group = variant(features), features.num_qo_heads // features.num_kv_heads
    tile = tiles.choose(kind, plan_batch.rows_of_a_request(lengths, limits) * group, arch)
    shape = TileShape(
        tile.rows,
        tile.cols,
        group,
        features.num_kv_heads,
        settings.causal,
        settings.window_left,
        sms * tiles.resident_ctas(tile, kind, arch),
        plans.min_split_tiles(tile.rows, tile.cols, *kind.head_dims),
        4 * (features.head_dim_vo + 1),
    )
    work = plan_batch.schedule(lengths, shape, limits, memory)
    slot_bytes = features.num_kv_heads * tile.rows * shape.partial_row_bytes
    rows_per_merge = min(tile.rows, plan_batch.longest_request(lengths, limits) * group)
    return Scheduled(
        tile,
        work,
        (work.item_capacity * features.num_kv_heads, 1, 1),
        (work.merge_capacity * features.num_kv_heads * rows_per_merge, 1, 1),
        rows_per_merge,
        limits.workspace_bytes // slot_bytes,
        slot_bytes,
        limits.graph is not None,
    )


class Ready(NamedTuple):
    """What runs of one settings share."""

    settings: Settings
    parameters: Parameters
    lengths: tuple[int, int, int, int, int]
    launch: Launch
    combine: Launch | None


@functools.lru_cache(REMEMBERED)
def ready(settings: Settings, tile: Tile, combine: bool, arch: Arch, device_index: int) -> Ready:
    features, window_left = settings.features, settings.window_left
    pdl = arch.pdl and settings.enable_pdl is not False
    return Ready(
        settings,
        Parameters(settings),
        (
            *(0, 0),  # every item has its own
            0 if settings.causal else UNBOUNDED - 1,  # an item adds kv_len - qo_len: row + bound + 1 must fit 32 bits
            -min(window_left, UNBOUNDED) if window_left >= 0 else -UNBOUNDED,
            0,
        ),
        load(spec(features, tile), arch.name, device_index, pdl),
        load(combine_spec(features), arch.name, device_index, pdl) if combine else None,
    )


class Planned:
    """Runs batches of one plan. `settings` of a run may differ from the planned ones in numbers and in what these
    make of the scores.
    """

    def __init__(self, settings: Settings, plan: Scheduled, staging: Staging, arch: Arch, device_index: int) -> None:
        self.grid, self.combine_grid, self.device_index = plan.grid, plan.combine_grid, device_index
        features, ints = settings.features, plan.work.ints
        if plan.fixed:
            staging.fixed_capacity(ints.size)
        self.records = staging.upload(ints)
        self.items = self.records.data_ptr()
        self.merges = self.items + 4 * ITEM_INTS * plan.work.item_capacity, plan.rows_per_merge, plan.tile.rows
        self.partial_bytes = plan.slots * features.num_kv_heads * plan.tile.rows * features.head_dim_vo * 4
        self.kernels = plan.tile, bool(self.combine_grid[0]), arch, device_index
        self.ready = ready(settings, *self.kernels)

    def __call__(self, problem: BatchProblem) -> None:
        if not self.grid[0]:
            return
        if problem.settings is not self.ready.settings:
            self.ready = ready(problem.settings, *self.kernels)
        _, parameters, lengths, launch, combine = self.ready
        stream, indices = current_stream(self.device_index), problem.kv_indices
        target = parameters.target(problem)
        o = 0 if combine is None else problem.workspace.data_ptr()  # type: ignore[union-attr]
        partials = o, o + self.partial_bytes
        batch = self.items, *partials, 0 if indices is None else indices.data_ptr()
        launch.fire(parameters.attention(problem, target, lengths, batch), self.grid, stream)
        if combine is not None:
            combine.fire(parameters.combine(target, partials, (0, 0), self.merges), self.combine_grid, stream)
