"""Host side of the mma.sync kernel for batches: the schedule of a plan, and the launches of its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cute_attn.kernels.fa2 import tiles as fa2_tiles
from cute_attn.kernels.fa2.host.params import Parameters
from cute_attn.kernels.fa2.host.variant import spec, variant
from cute_attn.kernels.fa2.spec import Tile
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host.batch import Grid, Ready, Scheduled, Values
from cute_attn.kernels.host.features import combine_spec
from cute_attn.kernels.host.load import load
from cute_attn.kernels.host.params import UNBOUNDED
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule import split_kv as split_kv_rules
from cute_attn.schedule.batch import TileShape

MANY_ROWS = fa2_tiles.APPEND_ROWS + 1  # packed rows of a request: no tile is chosen for more


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """Kernels and grids of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    main = spec(settings.features, plan.tile), plan.grid  # type: ignore[arg-type]
    combine = combine_spec(settings.features), plan.combine_grid
    return [launch for launch in (main, combine) if launch[1][0]]


def scheduled(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: batch_schedule.Memory = batch_schedule.new_ints,
) -> Scheduled:
    features = settings.features
    rows = batch_schedule.rows_of_a_request(lengths, limits) * (features.num_qo_heads // features.num_kv_heads)
    tile, shape = tiling(settings, min(rows, MANY_ROWS), arch, sms)
    return host_batch.scheduled(tile, shape, lengths, limits, memory, sms)


@functools.lru_cache(host_batch.REMEMBERED)
def tiling(settings: Settings, rows: int, arch: Arch, sms: int) -> tuple[Tile, TileShape]:
    """The tile for requests of `rows` packed rows, and what the schedule must know of it."""
    features = settings.features
    kind = variant(features)
    tile = fa2_tiles.choose(kind, rows, arch)
    return tile, TileShape(
        tile.rows,
        tile.cols,
        features.num_qo_heads // features.num_kv_heads,
        features.num_kv_heads,
        settings.causal,
        settings.window_left,
        sms * fa2_tiles.resident_ctas(tile, kind, arch),
        split_kv_rules.min_split_tiles(tile.rows, tile.cols, *kind.head_dims),
        4 * (features.head_dim_vo + 1),
    )


@functools.lru_cache(host_batch.REMEMBERED)
def ready(settings: Settings, tile: Tile, combine: bool, arch: Arch, device_index: int) -> Ready:
    features, pdl = settings.features, arch.pdl and settings.enable_pdl is not False
    return Ready(
        settings,
        Parameters(settings),
        load(spec(features, tile), arch.name, device_index, pdl),
        load(combine_spec(features), arch.name, device_index, pdl) if combine else None,
    )


class Planned(host_batch.Planned):
    def prepared(self, settings: Settings) -> Ready:
        plan = self.plan
        return ready(settings, plan.tile, bool(plan.combine_grid[0]), self.arch, self.device_index)

    def attention(self, ready: Ready, problem: BatchProblem, partials: tuple[int, int], stream: int) -> Values:
        settings, parameters, indices = ready.settings, ready.parameters, problem.kv_indices
        lengths = (
            *(0, 0),  # every item has its own
            0 if settings.causal else UNBOUNDED - 1,  # an item adds kv_len - qo_len: row + bound + 1 must fit 32 bits
            -min(settings.window_left, UNBOUNDED) if settings.window_left >= 0 else -UNBOUNDED,
            0,
        )
        batch = self.items, *partials, 0 if indices is None else indices.data_ptr()
        values: Values = parameters.attention(problem, parameters.target(problem), lengths, batch)
        return values

    def again(
        self, ready: Ready, problem: BatchProblem, values: Values
    ) -> Callable[[int, int, int, int, int, int], Values]:
        _, _, _, _, _, *rest = values
        return lambda q, k, v, out, lse, stream: (q, k, v, out, lse, *rest)


BATCHES = host_batch.Batches(scheduled, Planned, host_batch.sizes)
