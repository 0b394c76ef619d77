"""Host side of the wgmma kernel for batches: the schedule of a plan, and the launches of its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from cute_attn import plan as plans
from cute_attn import plan_batch
from cute_attn.backends import fa3_kernels as kernels
from cute_attn.backends.fa3_params import Launched, Parameters
from cute_attn.kernels.spec import HopperTile, KernelSpec
from cute_attn.kernels.work import ITEM_INTS
from cute_attn.plan_batch import TileShape, Work
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime import counters
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
    launch = scheduled(settings, lengths, limits, arch, kernels.multiprocessors(index), staging.reserve)
    return Planned(settings, launch, staging, arch, index)


def workspace(settings: Settings, lengths: BatchLengths, limits: BatchLimits) -> tuple[int, int]:
    """Bytes of the workspace that a plan uses if it has as many as it likes, and bytes of its records."""
    index = settings.features.device.index
    return workspace_on(settings, lengths, limits, for_device(index), kernels.multiprocessors(index))


def workspace_on(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> tuple[int, int]:
    """`workspace` of a GPU of `arch` with `sms` multiprocessors."""
    plan = scheduled(settings, lengths, limits._replace(workspace_bytes=plan_batch.UNLIMITED), arch, sms)
    return plan.work.num_partials * plan.slot_bytes, plan.work.ints.nbytes


class Scheduled(NamedTuple):
    """What a plan fixes for its runs."""

    tile: HopperTile
    heads: int  # in a tile
    work: Work
    total_tiles: int
    section: tuple[int, int]  # tiles of a section, and blocks of heads in it
    grid: Grid
    combine_grid: Grid
    rows_per_merge: int
    slots: int  # room for partials
    slot_bytes: int
    fixed: bool  # in memory that later plans use too


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """Kernels and grids of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    main = kernels.spec(settings.features, settings.window_left >= 0, plan.tile), plan.grid
    combine = kernels.combine_spec(settings.features), plan.combine_grid
    return [launch for launch in (main, combine) if launch[1][0]]


def scheduled(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: plan_batch.Memory = plan_batch.new_ints,
) -> Scheduled:
    """As fa2's; of `arch` there is one that these kernels run on."""
    features = settings.features
    tile = kernels.tile(features, settings.window_left >= 0)
    heads = kernels.heads_per_tile(features, plan_batch.rows_of_a_request(lengths, limits), tile.rows)
    head_blocks = features.num_qo_heads // heads
    longest = 0 if limits.graph else int(lengths.kv_len.max(initial=0))  # captured: the number of items may change
    section = kernels.section_heads(features, heads, longest)
    kv_heads = max(1, section * heads * features.num_kv_heads // features.num_qo_heads)
    shape = TileShape(
        tile.rows,
        tile.cols,
        heads,
        head_blocks,
        settings.causal,
        settings.window_left,
        sms,
        plans.min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo),
        4 * (features.head_dim_vo + 1),
        kernels.SECTION_BYTES // (kv_heads * kernels.token_bytes(features)),
    )
    work = plan_batch.schedule(lengths, shape, limits, memory)
    total = work.item_capacity * head_blocks
    slot_bytes = head_blocks * tile.rows * shape.partial_row_bytes
    rows_per_merge = min(tile.rows, plan_batch.longest_request(lengths, limits) * heads)
    return Scheduled(
        tile,
        heads,
        work,
        total,
        (max(1, work.item_capacity) * section, section),
        (min(total, sms), 1, 1),
        (work.merge_capacity * head_blocks * rows_per_merge, 1, 1),
        rows_per_merge,
        limits.workspace_bytes // slot_bytes,
        slot_bytes,
        limits.graph is not None,
    )


class Ready(NamedTuple):
    """What runs of one settings share."""

    settings: Settings
    parameters: Parameters
    bounds: tuple[int, int]
    launch: Launch
    combine: Launch | None


@functools.lru_cache(REMEMBERED)
def ready(settings: Settings, tile: HopperTile, heads: int, combine: bool, arch: Arch, device_index: int) -> Ready:
    features, parameters = settings.features, Parameters(settings, tile, heads)
    pdl = arch.pdl and settings.enable_pdl is not False
    kernel = kernels.spec(features, settings.window_left >= 0, tile)
    return Ready(
        settings,
        parameters,
        parameters.bounds(),
        kernels.load(kernel, arch.name, device_index, pdl),
        kernels.load(kernels.combine_spec(features), arch.name, device_index, pdl) if combine else None,
    )


class Planned:
    """Runs batches of one plan. `settings` of a run may differ from the planned ones in numbers and in what these
    make of the scores.
    """

    def __init__(self, settings: Settings, plan: Scheduled, staging: Staging, arch: Arch, device_index: int) -> None:
        self.plan, self.device_index, ints = plan, device_index, plan.work.ints
        if plan.fixed:
            staging.fixed_capacity(ints.size)
        self.records = staging.upload(ints)
        self.items = self.records.data_ptr()
        self.merges = self.items + 4 * ITEM_INTS * plan.work.item_capacity, plan.rows_per_merge, plan.tile.rows
        head_blocks = settings.features.num_qo_heads // plan.heads
        self.partial_bytes = plan.slots * head_blocks * plan.tile.rows * settings.features.head_dim_vo * 4
        self.kernels = plan.tile, plan.heads, bool(plan.combine_grid[0]), arch, device_index
        self.ready = ready(settings, *self.kernels)

    def __call__(self, problem: BatchProblem) -> None:
        plan = self.plan
        if not plan.grid[0]:
            return
        if problem.settings is not self.ready.settings:
            self.ready = ready(problem.settings, *self.kernels)
        _, parameters, bounds, launch, combine = self.ready
        stream, indices = current_stream(self.device_index), problem.kv_indices
        target = parameters.target(problem)
        o = 0 if combine is None else problem.workspace.data_ptr()  # type: ignore[union-attr]
        partials = o, o + self.partial_bytes
        launched = Launched(
            counters.of_device(self.device_index).address(stream),
            *bounds,
            plan.total_tiles,
            plan.section,
            items=(self.items, *partials),
            kv_indices=0 if indices is None else indices.data_ptr(),
        )
        launch.fire(parameters.values(problem, target, launched), plan.grid, stream)
        if combine is not None:
            values = parameters.combine(target, partials, (0, 0), self.merges)
            combine.fire(values, plan.combine_grid, stream)
