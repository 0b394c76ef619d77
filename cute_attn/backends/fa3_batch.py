"""Host side of the wgmma kernel for batches: the schedule of a plan, and the launches of its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from cute_attn import plan as plans
from cute_attn import plan_batch
from cute_attn.backends import batched
from cute_attn.backends import fa3_kernels as kernels
from cute_attn.backends.batched import Grid, Ready, Scheduled, Values
from cute_attn.backends.fa3_params import COUNTERS, Launched, Parameters
from cute_attn.kernels.spec import HopperTile, KernelSpec
from cute_attn.plan_batch import TileShape
from cute_attn.problem import BatchLengths, BatchLimits, BatchProblem, Settings
from cute_attn.runtime import counters
from cute_attn.runtime.arch import Arch


def launches(
    settings: Settings, lengths: BatchLengths, limits: BatchLimits, arch: Arch, sms: int
) -> list[tuple[KernelSpec, Grid]]:
    """Kernels and grids of a batch on a GPU of `arch` with `sms` multiprocessors. Needs no GPU."""
    plan = scheduled(settings, lengths, limits, arch, sms)
    main = kernel(settings, plan.tile), plan.grid  # type: ignore[arg-type]
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
    tokens = plan_batch.rows_of_a_request(lengths, limits)
    longest = 0 if limits.graph else int(lengths.kv_len.max(initial=0))  # captured: the number of items may change
    kv_len = 1 << (longest - 1).bit_length() if longest else 0
    tile, shape = tiling(settings, min(tokens, kernels.PACKED_TOKENS), kv_len, sms)
    return batched.scheduled(tile, shape, lengths, limits, memory, sms, most_ctas=sms)


@functools.lru_cache(batched.REMEMBERED)
def tiling(settings: Settings, qo_len: int, kv_len: int, sms: int) -> tuple[HopperTile, TileShape]:
    """The tile for requests of `qo_len` tokens and up to `kv_len` keys, and what the schedule must know of it. Heads
    that share a tile count as one group."""
    features = settings.features
    tile = kernels.tile(features, settings.window_left >= 0, settings.page_size)
    heads = kernels.heads_per_tile(features, qo_len, tile.rows)
    section = kernels.section_heads(features, heads, kv_len)
    kv_heads = max(1, section * heads * features.num_kv_heads // features.num_qo_heads)
    return tile, TileShape(
        tile.rows,
        tile.cols,
        heads,
        features.num_qo_heads // heads,
        settings.causal,
        settings.window_left,
        sms,
        plans.min_split_tiles(tile.rows, tile.cols, features.head_dim_qk, features.head_dim_vo),
        4 * (features.head_dim_vo + 1),
        section,
        kernels.SECTION_BYTES // (kv_heads * kernels.token_bytes(features)),
    )


def kernel(settings: Settings, tile: HopperTile) -> KernelSpec:
    return kernels.spec(settings.features, settings.window_left >= 0, tile, page_size=settings.page_size)


@functools.lru_cache(batched.REMEMBERED)
def ready(settings: Settings, tile: HopperTile, heads: int, combine: bool, arch: Arch, device_index: int) -> Ready:
    features, pdl = settings.features, arch.pdl and settings.enable_pdl is not False
    return Ready(
        settings,
        Parameters(settings, tile, heads),
        kernels.load(kernel(settings, tile), arch.name, device_index, pdl),
        kernels.load(kernels.combine_spec(features), arch.name, device_index, pdl) if combine else None,
    )


def sectioned(plan: Scheduled) -> tuple[int, int]:
    """Tiles of a section, and blocks of heads in it."""
    shape, items = plan.shape, plan.work.item_capacity
    heads = shape.section_heads if plan_batch.grouped(shape, items) else shape.num_kv_heads
    return max(1, items) * heads, heads


class Planned(batched.Planned):
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


BATCHES = batched.Batches(scheduled, Planned, batched.sizes)
