"""Host side of the mma.sync kernel for single requests: tile and split of a call, and its launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_attn.kernels.fa2 import tiles as fa2_tiles
from cute_attn.kernels.fa2.host.batch import BATCHES
from cute_attn.kernels.fa2.host.params import Parameters
from cute_attn.kernels.fa2.host.variant import spec, specs, variant
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host.features import combine_spec
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.problem import Problem, Settings
from cute_attn.runtime.arch import Arch, for_device, multiprocessors
from cute_attn.runtime.launch import Launch, current_stream
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule import split_kv as split_kv_rules

__all__ = ["Runner", "launches", "plan", "prepare", "specs", "workspace"]

plan, workspace = BATCHES.plan, BATCHES.workspace
REMEMBERED = 512  # lengths come from traffic: what is kept of them is bounded, and cheap to compute again


def prepare(settings: Settings) -> Callable[[Problem], None]:
    index = settings.features.device.index
    return Runner(settings, for_device(index), index, multiprocessors(index))


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """Kernels and grids of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    if problem.qo_len == 0:
        return []
    runner = Runner(problem.settings, arch, 0, sms)
    schedule, (num_splits, _) = runner.work(problem.qo_len, problem.kv_len)
    kernel = spec(problem.features, schedule.tile, split=num_splits > 1)
    main = kernel, (schedule.ctas, 1, num_splits)
    combine = combine_spec(problem.features), (problem.qo_len * problem.features.num_qo_heads, 1, 1)
    return [main] if num_splits == 1 else [main, combine]


class Schedule(NamedTuple):
    """What `qo_len` settles: the tile, the numbers that the split rule needs, and the kernels loaded so far."""

    tile: Tile
    ctas: int  # of one split
    tile_tokens: int  # tokens that one query tile can touch
    slots: int  # CTAs that the device holds at once
    min_tiles: int
    launches: dict[bool, Launch]  # by split


# The launch of a call, the one after it if the keys are split, the grid of the first, and tiles_per_split.
Plan = tuple[Launch, Launch | None, tuple[int, int, int], int]


class Runner:
    """Runs problems of the same settings. Kernels are loaded at first use; after that a call computes numbers."""

    def __init__(self, settings: Settings, arch: Arch, device_index: int, sms: int) -> None:
        features = settings.features
        self.features, self.parameters = features, Parameters(settings)
        self.arch, self.device_index, self.sms = arch, device_index, sms
        self.pdl = arch.pdl and settings.enable_pdl is not False
        self.group = features.num_qo_heads // features.num_kv_heads
        self.num_qo_heads, self.head_dim_vo = features.num_qo_heads, features.head_dim_vo
        self.causal, self.window_left = settings.causal, settings.window_left
        self.combine: Launch | None = None
        self.schedule = functools.lru_cache(REMEMBERED)(self._schedule)
        self.plan = functools.lru_cache(REMEMBERED)(self._plan)  # the layers of a model repeat the lengths of the first

    def __call__(self, problem: Problem) -> None:
        qo_len = problem.qo_len
        if qo_len == 0:
            return
        launch, combine, grid, tiles_per_split = self.plan(qo_len, problem.kv_len)
        stream, parameters = current_stream(self.device_index), self.parameters
        target, lengths = parameters.target(problem), self.lengths(qo_len, problem.kv_len, tiles_per_split)
        if combine is None:
            launch.fire(parameters.attention(problem, target, lengths), grid, stream)
            return
        rows, num_splits = qo_len * self.num_qo_heads, grid[2]
        workspace = self._workspace(problem, rows * num_splits)
        partial = parameters.partial_target(workspace, rows * num_splits)
        launch.fire(parameters.attention(problem, partial, lengths), grid, stream)
        combine.fire(parameters.combine(target, partial[:2], (qo_len, num_splits)), (rows, 1, 1), stream)

    def lengths(self, qo_len: int, kv_len: int, tiles_per_split: int) -> tuple[int, int, int, int, int]:
        """See `Parameters.attention`."""
        position, window_left = kv_len - qo_len, self.window_left  # of query row 0
        return (
            qo_len,
            kv_len,
            position if self.causal else UNBOUNDED,
            position - window_left if 0 <= window_left < kv_len else -UNBOUNDED,
            tiles_per_split,
        )

    def _plan(self, qo_len: int, kv_len: int) -> Plan:
        schedule, (num_splits, tiles_per_split) = self.work(qo_len, kv_len)
        split = num_splits > 1
        launch = schedule.launches.get(split) or self._launch(schedule, split)
        combine = (self.combine or self._combine()) if split else None
        return launch, combine, (schedule.ctas, 1, num_splits), tiles_per_split

    def work(self, qo_len: int, kv_len: int) -> tuple[Schedule, split_kv_rules.Split]:
        """The tile of a call with `qo_len` > 0, and its cut of the keys. Needs no GPU."""
        schedule = self.schedule(qo_len)
        tile, ctas, tile_tokens, slots, min_tiles, _ = schedule
        kv_tiles = visible_tiles = -(-kv_len // tile.cols)
        if self.window_left >= 0:
            visible = split_kv_rules.visible_tokens(qo_len, kv_len, tile_tokens, self.causal, self.window_left)
            visible_tiles = split_kv_rules.ceil_div(visible, tile.cols)
        return schedule, split_kv_rules.split_kv(kv_tiles, visible_tiles, ctas, slots, min_tiles)

    def _workspace(self, problem: Problem, rows: int) -> torch.Tensor:
        """Partials of a split launch. The caching allocator keeps them with a captured graph."""
        return problem.q.new_empty(rows * (self.head_dim_vo + 1), dtype=torch.float32)

    def _schedule(self, qo_len: int) -> Schedule:
        kind, rows = variant(self.features), qo_len * self.group
        tile = fa2_tiles.choose(kind, rows, self.arch)
        return Schedule(
            tile,
            split_kv_rules.ceil_div(rows, tile.rows) * self.features.num_kv_heads,
            (tile.rows - 1) // self.group + 2,
            self.sms * fa2_tiles.resident_ctas(tile, kind, self.arch),
            split_kv_rules.min_split_tiles(tile.rows, tile.cols, *kind.head_dims),
            {},
        )

    def _launch(self, schedule: Schedule, split: bool) -> Launch:
        kernel = spec(self.features, schedule.tile, split)
        launch = schedule.launches[split] = load(kernel, self.arch.name, self.device_index, self.pdl)
        return launch

    def _combine(self) -> Launch:
        self.combine = load(combine_spec(self.features), self.arch.name, self.device_index, self.pdl)
        return self.combine
