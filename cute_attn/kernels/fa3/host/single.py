"""Host side of the wgmma kernel for single requests: order of tiles and cut of the keys, and the launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_attn.kernels.fa3.host import variant as fa3_variant
from cute_attn.kernels.fa3.host.batch import BATCHES
from cute_attn.kernels.fa3.host.params import Launched, Parameters, divided
from cute_attn.problem import Problem, Settings
from cute_attn.runtime import counters
from cute_attn.runtime.arch import Arch, for_device, multiprocessors
from cute_attn.runtime.launch import Launch, current_stream
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule import split_kv as split_kv_rules

__all__ = ["Runner", "launches", "plan", "prepare", "specs", "workspace"]

plan, workspace = BATCHES.plan, BATCHES.workspace
specs = fa3_variant.specs
REMEMBERED = 512


def prepare(settings: Settings) -> Callable[[Problem], None]:
    index = settings.features.device.index
    return Runner(settings, for_device(index), index, multiprocessors(index))


def launches(problem: Problem, arch: Arch, sms: int) -> list[tuple[KernelSpec, tuple[int, int, int]]]:
    """Kernels and grids of `problem` on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    if problem.qo_len == 0:
        return []
    runner = Runner(problem.settings, arch, 0, sms)
    schedule = runner.schedule(problem.qo_len, problem.kv_len)
    main = runner.spec(schedule.num_splits > 1), schedule.ctas
    combine = fa3_variant.combine_spec(problem.features), (problem.qo_len * problem.features.num_qo_heads, 1, 1)
    return [main] if schedule.num_splits == 1 else [main, combine]


class Schedule(NamedTuple):
    """What the lengths settle."""

    heads: int  # in a tile
    num_splits: int
    total_tiles: int
    ctas: tuple[int, int, int]
    section: tuple[int, int]  # `Launched.section`
    numbers: tuple[int, ...]  # `Launched.grid`


class Runner:
    """Runs problems of the same settings. Kernels are loaded at first use; after that a call computes numbers."""

    def __init__(self, settings: Settings, arch: Arch, device_index: int, sms: int) -> None:
        self.settings, self.features = settings, settings.features
        self.arch, self.device_index, self.sms = arch, device_index, sms
        self.pdl = arch.pdl and settings.enable_pdl is not False
        self.tile = fa3_variant.tile(self.features, settings.window_left >= 0)
        self.schedule = functools.lru_cache(REMEMBERED)(self._schedule)
        self.parameters = functools.cache(lambda heads: Parameters(settings, self.tile, heads))

    def __call__(self, problem: Problem) -> None:
        qo_len = problem.qo_len
        if qo_len == 0:
            return
        schedule = self.schedule(qo_len, problem.kv_len)
        stream, parameters = current_stream(self.device_index), self.parameters(schedule.heads)
        launched = Launched(
            counters.of_device(self.device_index).address(stream),
            *parameters.bounds(),
            schedule.total_tiles,
            schedule.section,
            schedule.numbers,
        )
        target = parameters.target(problem)
        launch = self.launch(schedule.num_splits > 1)
        if schedule.num_splits == 1:
            launch.fire(parameters.values(problem, target, launched), schedule.ctas, stream)
            return
        rows = qo_len * self.features.num_qo_heads
        workspace = self._workspace(problem, rows * schedule.num_splits)
        partial = parameters.partial_target(workspace, rows * schedule.num_splits)
        launch.fire(parameters.values(problem, partial, launched), schedule.ctas, stream)
        values = parameters.combine(target, partial[:2], (qo_len, schedule.num_splits))
        self.combine.fire(values, (rows, 1, 1), stream)

    def spec(self, split: bool) -> KernelSpec:
        return fa3_variant.spec(self.features, self.settings.window_left >= 0, self.tile, split)

    @functools.cache  # noqa: B019  (runners live as long as the settings are remembered)
    def launch(self, split: bool) -> Launch:
        return fa3_variant.load(self.spec(split), self.arch.name, self.device_index, self.pdl)

    @functools.cached_property
    def combine(self) -> Launch:
        return fa3_variant.load(fa3_variant.combine_spec(self.features), self.arch.name, self.device_index, self.pdl)

    def _workspace(self, problem: Problem, rows: int) -> torch.Tensor:
        """Partials of a split launch. The caching allocator keeps them with a captured graph."""
        return problem.q.new_empty(rows * (self.features.head_dim_vo + 1), dtype=torch.float32)

    def _schedule(self, qo_len: int, kv_len: int) -> Schedule:
        features, tile = self.features, self.tile
        heads = fa3_variant.heads_per_tile(features, qo_len, tile.rows)
        blocks, head_blocks = split_kv_rules.ceil_div(qo_len * heads, tile.rows), features.num_qo_heads // heads
        kv_tiles = visible_tiles = split_kv_rules.ceil_div(kv_len, tile.cols)
        window_left = self.settings.window_left
        if window_left >= 0:
            tokens = (tile.rows - 1) // heads + 2
            visible = split_kv_rules.visible_tokens(qo_len, kv_len, tokens, self.settings.causal, window_left)
            visible_tiles = split_kv_rules.ceil_div(visible, tile.cols)
        least = split_kv_rules.min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo)
        num_splits, tiles = split_kv_rules.split_kv(kv_tiles, visible_tiles, blocks * head_blocks, self.sms, least)
        section = fa3_variant.section_heads(features, heads, kv_len)
        total = num_splits * blocks * head_blocks
        numbers = (
            qo_len,
            kv_len,
            blocks - 1,
            tiles * tile.cols,
            *divided(blocks * head_blocks),
        )
        return Schedule(heads, num_splits, total, (min(total, self.sms), 1, 1), (section * blocks, section), numbers)
