"""Specs of the decode kernel for problems of given features."""

from __future__ import annotations

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.host.features import kv_dtype
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.tiles import Rings, Shape
from cute_attn.kernels.xqa.umma import tiles as umma_tiles
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.problem import DecodeProblem, Features, Request, Settings, short
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.split_kv import ceil_div

MAX_GRID_Z = 65535  # CTAs along the third axis of a grid: requests of which each has some of its own


def shape_of(batch_size: int, settings: Settings, qo_len: int, longest: int | None = None) -> Shape:
    """Return what is known of a launch. `longest`: most keys of a request, in all launches."""
    window, features = settings.window_left, settings.features
    kv_heads = features.num_kv_heads
    rows = qo_len * (features.num_qo_heads // kv_heads)
    units, segments = (kv_heads * ceil_div(rows, n) for n in (tiles.MOST_ROWS, tiles.most_rows(features.head_dim_qk)))
    keys = longest
    if window >= 0:
        keys = window + qo_len if longest is None else min(window + qo_len, longest)
    return Shape(batch_size, kv_heads, units, keys if batch_size <= MAX_GRID_Z else None, batch_size * segments)


def shape_of_call(problem: Request) -> Shape:
    """Return what is known of the launch of a call without a plan."""
    settings, qo_len = problem.settings, problem.qo_len
    if not isinstance(problem, DecodeProblem):
        return shape_of(1, settings, qo_len, problem.kv_len)
    most = problem.max_kv_len  # room of the page table: in engines that of their model, which says little if it is much
    return shape_of(len(problem.seq_lens), settings, qo_len, most if most <= tiles.LONG else None)


def rule_of(features: Features, arch: Arch, shape: Shape) -> Rule[Rings]:
    """Return the rule by which a launch over these caches takes a kernel."""
    return tiles.find(arch, KV_BITS[kv_dtype(features)], features.head_dim_qk, shape)


def rules(features: Features, arch: Arch) -> list[Rule[Rings]]:
    """Return every rule that launches over these caches may follow."""
    return tiles.rules(arch, KV_BITS[kv_dtype(features)], features.head_dim_qk)


def choose_spec(features: Features, qo_len: int, rule: Rule[Rings], arch: Arch) -> XqaSpec | XqaUmmaSpec:
    """Return the kernel for `qo_len` query tokens per request."""
    rows = qo_len * (features.num_qo_heads // features.num_kv_heads)
    dtypes = short(features.q_dtype), kv_dtype(features), short(features.o_dtype)
    if umma_tiles.supports(dtypes[1], features.head_dim_qk, rows, arch):
        return umma_tiles.choose(*dtypes, features.head_dim_qk, rows, features.draft_mask, arch)
    shape = features.head_dim_qk, rows, features.draft_mask
    return tiles.choose(*dtypes, *shape, rule, arch, features.num_kv_heads)


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Return every kernel that calls of one query token and of these features may need."""
    return list(dict.fromkeys(choose_spec(features, 1, rule, arch) for rule in rules(features, arch)))
