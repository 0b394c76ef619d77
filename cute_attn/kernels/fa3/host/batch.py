"""Host side of the wgmma kernel for batches: the schedule of a plan, and the launches of its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cute_attn.kernels.fa3.host import variant as fa3_variant
from cute_attn.kernels.fa3.host.params import COUNTERS, Launched, Parameters
from cute_attn.kernels.fa3.spec import HopperTile
from cute_attn.kernels.host import batch as host_batch
from cute_attn.kernels.host.batch import Grid, Ready, Scheduled, Values
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime import counters
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule import batch as batch_schedule
from cute_attn.schedule import split_kv as split_kv_rules
from cute_attn.schedule.batch import TileShape


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """Kernels and grids of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    main = kernel(settings, plan.tile), plan.grid  # type: ignore[arg-type]
    combine = fa3_variant.combine_spec(settings.features), plan.combine_grid
    return [launch for launch in (main, combine) if launch[1][0]]


def scheduled(
    settings: Settings,
    lengths: BatchLengths,
    limits: BatchLimits,
    arch: Arch,
    sms: int,
    memory: batch_schedule.Memory = batch_schedule.new_ints,
) -> Scheduled:
    """As fa2's; of `arch` there is one that these kernels run on."""
    tokens = batch_schedule.rows_of_a_request(lengths, limits)
    longest = 0 if limits.graph else int(lengths.kv_len.max(initial=0))  # captured: the number of items may change
    kv_len = 1 << (longest - 1).bit_length() if longest else 0
    tile, shape = tiling(settings, min(tokens, fa3_variant.PACKED_TOKENS), kv_len, sms)
    return host_batch.scheduled(tile, shape, lengths, limits, memory, sms, most_ctas=sms)


@functools.lru_cache(host_batch.REMEMBERED)
def tiling(settings: Settings, qo_len: int, kv_len: int, sms: int) -> tuple[HopperTile, TileShape]:
    """The tile for requests of `qo_len` tokens and up to `kv_len` keys, and what the schedule must know of it. Heads
    that share a tile count as one group."""
    features = settings.features
    tile = fa3_variant.tile(features, settings.window_left >= 0, settings.page_size)
    heads = fa3_variant.heads_per_tile(features, qo_len, tile.rows)
    section = fa3_variant.section_heads(features, heads, kv_len)
    kv_heads = max(1, section * heads * features.num_kv_heads // features.num_qo_heads)
    return tile, TileShape(
        tile.rows,
        tile.cols,
        heads,
        features.num_qo_heads // heads,
        settings.causal,
        settings.window_left,
        sms,
        split_kv_rules.min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo),
        4 * (features.head_dim_vo + 1),
        section,
        fa3_variant.SECTION_BYTES // (kv_heads * fa3_variant.token_bytes(features)),
    )


def kernel(settings: Settings, tile: HopperTile) -> KernelSpec:
    return fa3_variant.spec(settings.features, settings.window_left >= 0, tile, page_size=settings.page_size)


@functools.lru_cache(host_batch.REMEMBERED)
def ready(settings: Settings, tile: HopperTile, heads: int, combine: bool, arch: Arch, device_index: int) -> Ready:
    features, pdl = settings.features, arch.pdl and settings.enable_pdl is not False
    return Ready(
        settings,
        Parameters(settings, tile, heads),
        fa3_variant.load(kernel(settings, tile), arch.name, device_index, pdl),
        fa3_variant.load(fa3_variant.combine_spec(features), arch.name, device_index, pdl) if combine else None,
    )


def sectioned(plan: Scheduled) -> tuple[int, int]:
    """Tiles of a section, and blocks of heads in it."""
    shape, items = plan.shape, plan.work.item_capacity
    heads = shape.section_heads if batch_schedule.grouped(shape, items) else shape.num_kv_heads
    return max(1, items) * heads, heads


class Planned(host_batch.Planned):
    @functools.cached_property
    def section(self) -> tuple[int, int]:
        return sectioned(self.plan)

    def prepared(self, settings: Settings) -> Ready:
        plan = self.plan
        counters.of_device(self.device_index)  # like kernels made now: the first run may be one that is captured
        merges = bool(plan.combine_grid[0])
        return ready(settings, plan.tile, plan.shape.group, merges, self.arch, self.device_index)  # type: ignore[arg-type]

    def attention(self, ready: Ready, problem: BatchProblem, partials: tuple[int, int], stream: int) -> Values:
        parameters, indices = ready.parameters, problem.kv_indices
        right, left = parameters.bounds()
        launched = Launched(
            counters.of_device(self.device_index).address(stream),
            right,
            left,
            self.plan.total,
            self.section,
            items=(self.items, *partials),
            kv_indices=0 if indices is None else indices.data_ptr(),
        )
        values: Values = parameters.values(problem, parameters.target(problem), launched)
        return values

    def again(
        self, ready: Ready, problem: BatchProblem, values: Values
    ) -> Callable[[int, int, int, int, int, int], Values]:
        of = ready.parameters
        q_map, k_map, v_map = of.q_map(problem.q), of.kv_map(problem.k), of.kv_map(problem.v)
        counter = counters.of_device(self.device_index).address
        middle, rest = values[7:COUNTERS], values[COUNTERS + 1 :]
        return lambda q, k, v, out, lse, stream: (
            *(q_map(q), k_map(k), v_map(v), out, lse, k, v),
            *middle,
            counter(stream),
            *rest,
        )


BATCHES = host_batch.Batches(scheduled, Planned, host_batch.sizes)
