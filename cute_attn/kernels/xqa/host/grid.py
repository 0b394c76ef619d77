"""Grids of the decode kernel, and the device memory that the CTAs of a launch share."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cute_attn.kernels.host.batch import MAX_SETTINGS
from cute_attn.kernels.host.prepared import Grid
from cute_attn.kernels.xqa.host.variant import choose_spec
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch
from cute_attn.schedule.batch import UNLIMITED
from cute_attn.schedule.split_kv import ceil_div

MAX_IDLE = 1 / 32  # of all CTAs
# Of the SMs, to which clusters may be given: those of a GPC that its clusters leave over take none, and a cluster that
# has to wait for another costs more than SMs without one (131072 keys of 8 kv heads, 16 clusters of 8, H100: 16 %).
CLUSTERED = 3 / 4


class LaunchConfig(NamedTuple):
    """Kernel and grid of launches with the same settings and number of query tokens per request."""

    spec: XqaSpec | XqaUmmaSpec
    qo_len: int  # query tokens of every request, or the most of any
    row_blocks: int  # blocks of query rows per request and kv head
    grid: Grid  # (CTA groups, CTAs per group, 1); of whole segments (units / heads of a CTA, 1, 1), for one request
    ctas: int  # CTAs of the grid, and some that are idle, that may leave partial results; 0 of whole segments
    counter_bytes: int
    partial_bytes: int  # 0 for one CTA, which leaves no partial results

    def grid_of(self, batch_size: int) -> Grid:
        """Returns the grid of a launch of `batch_size` requests."""
        return (self.grid[0], batch_size, 1) if self.spec.whole else self.grid


@functools.lru_cache(MAX_SETTINGS)
def launch_config(
    settings: Settings, qo_len: int, segments: Segments, arch: Arch, sms: int, workspace_bytes: int = UNLIMITED
) -> LaunchConfig:
    """Returns the kernel and grid for a GPU of `arch` with `sms` multiprocessors. `segments`: as `variant.segments`
    says. `workspace_bytes`: room for partial results; fewer CTAs, down to one, need less.
    """
    features = settings.features
    spec = choose_spec(features, qo_len, segments, arch)
    row_blocks = ceil_div(qo_len * (features.num_qo_heads // features.num_kv_heads), spec.rows)
    units = features.num_kv_heads * row_blocks
    if spec.whole:
        if features.num_kv_heads % spec.heads:
            raise ValueError(f"{spec} has {spec.heads} kv heads a CTA, which do not divide {features.num_kv_heads}")
        return LaunchConfig(spec, qo_len, row_blocks, (units // spec.heads, 1, 1), 0, 0, 0)
    if spec.cluster > 1:
        return LaunchConfig(spec, qo_len, row_blocks, *clustered(spec, units, sms, workspace_bytes))
    ctas = max(1, min(sms * spec.ctas, workspace_bytes // partial_bytes_per_cta(spec)))
    groups = cta_group_count(features.num_kv_heads * row_blocks, ctas)
    partial_bytes = 0 if ctas == 1 else ctas * partial_bytes_per_cta(spec)
    return LaunchConfig(spec, qo_len, row_blocks, (groups, ctas // groups, 1), ctas, 4 * ctas, partial_bytes)


def clustered(spec: XqaSpec | XqaUmmaSpec, units: int, sms: int, workspace_bytes: int) -> tuple[Grid, int, int, int]:
    """Returns the grid of one request, whose units have as many clusters each, and the CTAs, counter_bytes and
    partial_bytes of its `LaunchConfig`: none for one cluster a unit, which merges in shared memory alone."""
    ctas = min(int(sms * CLUSTERED) * spec.ctas, workspace_bytes // partial_bytes_per_cta(spec))
    clusters = max(1, ctas // (units * spec.cluster))
    used = units * clusters * spec.cluster if clusters > 1 else 0
    return (units, clusters * spec.cluster, 1), used, 4 * used, used * partial_bytes_per_cta(spec)


def partial_bytes_per_cta(spec: XqaSpec | XqaUmmaSpec) -> int:
    """Returns the bytes of two partial results: a CTA may end one segment and begin another."""
    return 2 * spec.rows * (spec.head_dim + 2) * 4


@functools.lru_cache(MAX_SETTINGS)
def cta_group_count(units: int, ctas: int) -> int:
    """Returns the largest number of CTA groups that share the units evenly and leave at most MAX_IDLE CTAs idle."""
    return max(n for n in range(1, units + 1) if units % n == 0 and ctas % n <= ctas * MAX_IDLE)
