"""Specs and grids of the decode kernel, and the device memory that the CTAs of a launch share."""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.host.features import kv_dtype
from cute_attn.kernels.host.params import Fields, divisor, magic
from cute_attn.kernels.host.prepared import Grid, prepared
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import CLUSTER_REQUESTS, DecodeSpec, XqaSpec
from cute_attn.kernels.xqa.tiles import Rings, Shape
from cute_attn.kernels.xqa.umma import tiles as umma_tiles
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.problem import UNLIMITED, Features, Settings, short
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.split_kv import ceil_div

MAX_IDLE = 1 / 32  # of all CTAs
# Of the SMs, to which clusters of more than two CTAs may be given: those of a GPC that its clusters leave over take
# none, and a cluster that has to wait for another costs more than SMs without one (131072 keys of 8 kv heads, 16
# clusters of 8, H100: 16 %).
CLUSTERED = 3 / 4
MAX_GRID_Z = 65535  # CTAs along the third axis of a grid: requests of which each has some of its own


def rule_of(settings: Settings, arch: Arch, batch_size: int, qo_len: int, longest: int | None = None) -> Rule[Rings]:
    """Return the rule by which a launch takes a kernel. `longest`: most keys of a request, in all launches.

    The rule is kept for all numbers of requests and of keys that rules do not tell apart: they vary from step to step.
    """
    requests = prepared(_request_steps, settings.features, qo_len)
    longest = None if longest is None else same_keys(longest)
    batch_size = requests[bisect(requests, batch_size)] - 1
    return prepared(_rule_of, settings.features, settings.window_left, arch, batch_size, qo_len, longest)


def same_keys(longest: int) -> int:
    """Return the largest number of keys that rules do not tell apart from so many."""
    steps = tiles.STEPS["keys"]
    return int(steps[bisect(steps, longest)]) - 1


def _request_steps(features: Features, qo_len: int) -> list[int]:
    """Return the steps of rules in numbers of requests, in order, and one number beyond all."""
    of_request = Shape(1, features.num_kv_heads, rows=features.packed_rows(qo_len)).numbers(features.head_dim_qk)
    numbers = (ceil_div(n, max(1, of_request[name])) for name in tiles.PER_STEP for n in tiles.STEPS[name])
    return sorted({MAX_GRID_Z + 1, *numbers})


def _rule_of(
    features: Features, window: int, arch: Arch, batch_size: int, qo_len: int, longest: int | None
) -> Rule[Rings]:
    keys = longest
    if window >= 0:
        keys = window + qo_len if longest is None else min(window + qo_len, longest)
    known = keys if batch_size <= MAX_GRID_Z else None
    shape = Shape(batch_size, features.num_kv_heads, known, features.packed_rows(qo_len))
    return tiles.find(arch, KV_BITS[kv_dtype(features)], features.head_dim_qk, shape)


def choose_spec(features: Features, qo_len: int, rule: Rule[Rings], arch: Arch) -> XqaSpec | XqaUmmaSpec:
    """Return the kernel for `qo_len` query tokens per request."""
    dtypes = short(features.q_dtype), kv_dtype(features), short(features.o_dtype)
    operands = *dtypes, features.head_dim_qk, features.packed_rows(qo_len), features.draft_mask
    return (
        tiles.choose(*operands, rule, arch, features.num_kv_heads) if rule.value else umma_tiles.choose(*operands, arch)
    )


def specs(features: Features, arch: Arch, qo_len: int = 1) -> list[KernelSpec]:
    """Return every kernel that calls of these features and `qo_len` query tokens per request may need."""
    rules = tiles.rules(arch, KV_BITS[kv_dtype(features)], features.head_dim_qk, features.packed_rows(qo_len))
    return list(dict.fromkeys(choose_spec(features, qo_len, rule, arch) for rule in rules))


class LaunchConfig(NamedTuple):
    """Kernel and grid of launches with the same settings and number of query tokens per request."""

    spec: DecodeSpec
    qo_len: int  # query tokens of every request, or the most of any
    row_blocks: int  # blocks of query rows per request and kv head
    grid: Grid  # (CTA groups, CTAs per group, 1), or of a request (units / units of a CTA, 1, 1)
    ctas: int = 0  # CTAs of the grid, and some that are idle, that may leave partial results
    partial_bytes: int = 0  # 0 for one CTA, which leaves no partial results
    min_share: int = 1  # tiles of a CTA
    dealt: int = 0  # positions of a segment that CTAs take whole, see `parts.tickets`

    @property
    def counter_bytes(self) -> int:
        return 4 * self.ctas

    def grid_of(self, batch_size: int) -> Grid:
        """Returns the grid of a launch of `batch_size` requests."""
        if self.spec.work == "cluster" and batch_size > CLUSTER_REQUESTS:
            raise ValueError(f"clusters read the lengths of at most {CLUSTER_REQUESTS} requests, got {batch_size}")
        return (*self.grid[:2], batch_size) if self.spec.whole else self.grid

    def fields(self, num_kv_heads: int, group: int, page_size: int) -> Fields:
        """Returns the parameters by which CTAs share the keys. `group`: query heads of a kv head."""
        multiplier, shift = magic(self.grid[1] // self.spec.cluster_size)
        return {
            "q_len": self.qo_len,
            "num_kv_heads": num_kv_heads,
            **divisor("row_blocks", self.row_blocks),
            "units_per_cta_group": num_kv_heads // self.spec.heads * self.row_blocks // self.grid[0],
            "shares_multiplier": multiplier,
            "shares_shift": shift,
            **divisor("group", group),
            **divisor("page_size", page_size),
            "overhead": self.spec.segment_overhead * self.spec.cluster_size,
            "min_share": self.min_share,
        }


def launch_config(
    features: Features,
    qo_len: int,
    rule: Rule[Rings],
    arch: Arch,
    sms: int,
    workspace_bytes: int = UNLIMITED,
) -> LaunchConfig:
    """Returns the kernel and grid for a GPU of `arch` with `sms` multiprocessors. `rule`: one of those for these
    features. `workspace_bytes`: room for partial results; fewer CTAs, down to one or a cluster, need less.
    """
    spec = choose_spec(features, qo_len, rule, arch)
    if features.num_kv_heads % spec.heads:
        raise ValueError(f"{spec} has {spec.heads} kv heads a CTA, which do not divide {features.num_kv_heads}")
    row_blocks = ceil_div(features.packed_rows(qo_len), spec.rows)
    if spec.whole:
        return LaunchConfig(spec, qo_len, row_blocks, (features.num_kv_heads // spec.heads * row_blocks, 1, 1))
    return shares(spec, qo_len, row_blocks, features.num_kv_heads, sms, workspace_bytes)


def shares(
    spec: DecodeSpec, qo_len: int, row_blocks: int, num_kv_heads: int, sms: int, workspace_bytes: int
) -> LaunchConfig:
    """Returns a launch of as many CTAs as run at a time, or of as many clusters as do for certain."""
    units, size = num_kv_heads // spec.heads * row_blocks, spec.cluster_size
    room = int(sms * (CLUSTERED if size > 2 else 1)) * spec.ctas  # two CTAs of a cluster have the SMs of a TPC
    count = max(1, min(room, workspace_bytes // partial_bytes_per_cta(spec)) // size)
    groups = cta_group_count(units, count)
    of_group, ctas = count // groups, count * size
    partial_bytes = 0 if count == 1 else ctas * partial_bytes_per_cta(spec)
    min_share = 1 if of_group == size == 1 else spec.teams * size
    grid = groups, of_group * size, 1
    return LaunchConfig(spec, qo_len, row_blocks, grid, ctas, partial_bytes, min_share, tiles.DEALT)


def partial_bytes_per_cta(spec: DecodeSpec) -> int:
    """Returns the bytes of two partial results of each of its units: a CTA may end one segment and begin another."""
    return 2 * spec.heads * spec.rows * (spec.head_dim + 2) * 4


def cta_group_count(units: int, ctas: int) -> int:
    """Returns the largest number of CTA groups that share the units evenly and leave at most MAX_IDLE CTAs idle."""
    return max(n for n in range(1, units + 1) if units % n == 0 and ctas % n <= ctas * MAX_IDLE)
