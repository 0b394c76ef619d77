"""Persistent kernels as kernel families: their specs and tiles, for batches and single requests, and the order in which
a launch takes tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from cute_attn.kernels.blocks.attention_spec import PersistentSpec, PersistentTile
from cute_attn.kernels.blocks.tiles import Launch, Operands, TileProblem, tile_rows
from cute_attn.kernels.host.batch import Tiling
from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.features import batched, combine_spec, kv_dtype, rotates, schedule, score_steps
from cute_attn.kernels.host.params import magic
from cute_attn.kernels.host.persistent.prepared import PersistentKernel, order_values
from cute_attn.kernels.host.prepared import Grid, prepared
from cute_attn.kernels.rules import Rule
from cute_attn.problem import Features, Settings, short
from cute_attn.request.settings import FP8, MAX_KV_LEN
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import Values
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.batch import Size, orders_by_l2
from cute_attn.schedule.params import SchedulerParams
from cute_attn.schedule.split_kv import Split, ceil_div, min_split_tiles

SMALL_PAGE, LARGE_PAGE = 1, 128  # tokens: every page size has the kernels of one of these
SECTION_BYTES = 32 << 20  # keys and values of an L2 section
# The same in launches of short requests: 1.01 to 1.07 times as fast as sections of 32 MiB on 16 x 1024 causal tokens,
# where longer requests lose up to 1.3 % (H100).
SHORT_SECTION_BYTES = 16 << 20
NVFP4_SECTION_BYTES = 18 << 20  # the same with their block scales: as many tokens as of 8 bits, which was measured
WINDOWS = (-1, 0, MAX_KV_LEN)  # none, the shortest and the longest: every window has the tile of one of them
# Sizes of launches: query tokens of long requests; keys of short ones, and of images of 14 x 14 patches; query rows per
# SM up to which a launch of short requests has few.
LONG_TOKENS, SHORT_KEYS, SHORTEST_KEYS, FEW_ROWS = 4096, 1024, 224, 2 * 128

T = TypeVar("T", bound=PersistentTile)


@dataclass(frozen=True, eq=False)
class PersistentFamily(TiledFamily[T]):
    """Compared by identity: it is part of keys."""

    name: str
    spec_type: Callable[..., PersistentSpec]
    page_source: Callable[[tuple[int, int], int, Operands], str]  # from head dims and page size to `kv` of a spec
    rule_for: Callable[[str, TileProblem], Rule[T]]  # from an architecture
    kernel = PersistentKernel
    packs_any_group: bool = False  # whether heads share tiles whose rows their number does not divide

    def spec(self, settings: Settings, tile: T, split: bool) -> PersistentSpec:
        features = settings.features
        edges = "band" if settings.window_left >= 0 else "stop"
        mask = "packed" if features.custom_mask else "multi_item" if features.multi_item else edges
        return self.spec_type(
            dtype=short(features.q_dtype),
            out_dtype="float32" if split else short(features.o_dtype),
            head_dim_qk=features.head_dim_qk,
            head_dim_vo=features.head_dim_vo,
            mask=mask,
            scores=scores(features),
            split=split,
            schedule=schedule(features),
            kv=self.kv_source(settings),
            kv_dtype=kv_dtype(features),
            tile=tile,
            **({"pos_encoding": "rope"} if rotates(features) else {}),
        )

    def kv_source(self, settings: Settings) -> str:
        """Returns `kv` of a spec."""
        features = settings.features
        if features.kv_source != "paged":
            return "dense"
        if features.kv_block_scales:  # with boxes of TMA as well as copies of scales the producer spills registers
            return "gathered"
        return self.page_source(features.head_dims, settings.page_size, operands(features))

    def rule(self, settings: Settings, arch: str, launch: Launch = "") -> Rule[T]:
        """Return the rule by which these settings have their tile on an architecture, for a launch."""
        features, causal, window_left = settings.features, settings.causal, settings.window_left
        masked = features.custom_mask or features.multi_item
        modified, window = masked or bool(scores(features)), window_left >= 0
        problem = TileProblem(
            features.head_dims,
            self.kv_source(settings),
            operands(features),
            plain=not (modified or window),
            full=not (masked or window or causal),
            window_left=window_left if causal and not modified else -1,
            group=features.num_qo_heads // features.num_kv_heads,
            launch=launch,
            chunk_invariant=features.chunk_invariant,
        )
        return self.rule_for(arch, problem)

    def heads_per_tile(self, features: Features, qo_len: int, tile: T) -> int:
        """Return the number of query heads whose rows share a tile: a whole GQA group, or 1.

        A group that divides the tile's rows always shares them: it never has more tiles, and causal tiles of fewer
        tokens see fewer hidden keys. Another group leaves rows unused, and shares a tile where requests of `qo_len`
        query tokens then have fewer.
        """
        group = features.num_qo_heads // features.num_kv_heads
        if tile.q_box_rows % group == 0:
            return group
        if group > tile.rows or not self.packs_any_group:
            return 1
        packed, alone = math.ceil(qo_len * group / tile_rows(tile.rows, group)), group * math.ceil(qo_len / tile.rows)
        return group if packed < alone else 1

    def specs(self, features: Features, arch: Arch) -> list[KernelSpec]:
        kernels: list[KernelSpec] = [
            self.spec(settings, self.rule(settings, arch.name, launch).value, split)
            for window, causal, page_size in itertools.product(WINDOWS, (True, False), (SMALL_PAGE, LARGE_PAGE))
            for settings in (Settings(features, causal=causal, window_left=window, page_size=page_size),)
            for launch in get_args(Launch)
            for split in ((False,) if batched(features) else (False, True))
        ]
        return [*dict.fromkeys(kernels), combine_spec(features)]

    def tiling(self, settings: Settings, size: Size, arch: Arch, sms: int) -> Tiling[T]:
        features = settings.features
        launch = launch_of(size.rows * features.num_qo_heads, sms, size.qo_len, size.kv_len)
        rule = prepared(self.rule, settings, arch.name, launch)
        heads = self.heads_per_tile(features, size.qo_len, rule.value)
        section = 1 << (size.longest - 1).bit_length() if size.longest else 0
        return prepared(_tiling, settings, rule, heads, section, sms, launch)

    def request_launch(
        self, settings: Settings, tiling: Tiling[T], split: Split, qo_len: int, kv_len: int
    ) -> tuple[Grid, Values]:
        heads, tile = tiling.params.group_size, tiling.tile
        blocks = ceil_div(qo_len * heads, tiling.params.rows)
        query_tiles = blocks * tiling.params.num_kv_heads
        total, section = split.num_splits * query_tiles, section_heads(settings.features, heads, kv_len)
        order = order_values(total, section * blocks, section)
        lengths = qo_len, kv_len, blocks - 1, split.tiles_per_split * tile.cols, query_tiles, *magic(query_tiles)
        return (tile.ctas * min(total, tiling.params.resident_ctas), 1, 1), order + lengths


def _tiling(settings: Settings, rule: Rule[Any], heads: int, kv_len: int, sms: int, launch: Launch) -> Tiling[Any]:
    """Returns the tiling for a launch with requests of up to `kv_len` keys. To the scheduler, `heads` that share a tile
    are one group.
    """
    features, tile = settings.features, rule.value
    section = section_heads(features, heads, kv_len, launch)
    kv_heads = max(1, section * heads * features.num_kv_heads // features.num_qo_heads)
    groups = max(1, sms * tile.per_sm // tile.ctas)  # of CTAs that share work items
    params = SchedulerParams(
        rows=tile_rows(tile.rows, heads),
        cols=tile.cols,
        group_size=heads,
        num_kv_heads=features.num_qo_heads // heads,
        causal=settings.causal,
        window_left=settings.window_left,
        resident_ctas=groups,
        min_split_tiles=min_split_tiles(tile.rows, tile.cols, *features.head_dims),
        partial_row_bytes=4 * (features.head_dim_vo + 1),
        l2_section_heads=section,
        l2_kv_tokens=section_tokens(features, launch) // kv_heads,
    )
    return prepared(Tiling, tile, rule, params, tile.ctas, batch_order)


def batch_order(params: SchedulerParams, items: int, late: int) -> Values:
    """Returns the values of the kernel's ORDER_FIELDS for a launch of so many work items. `late`: query tiles whose
    parts come last.
    """
    heads = params.l2_section_heads if orders_by_l2(params, items, late) else params.num_kv_heads
    return order_values(items * params.num_kv_heads, max(1, items) * heads, heads)


def launch_of(rows: int, sms: int, qo_len: int, kv_len: int | None) -> Launch:
    """Return the size of a launch. `rows`: query rows of all heads and requests; `qo_len`: query tokens of a typical
    request; `kv_len`: mean number of keys of a request, None where no length may decide.
    """
    if kv_len is None:
        return ""
    if kv_len > SHORT_KEYS:
        return "long" if qo_len >= LONG_TOKENS else ""
    if rows <= FEW_ROWS * sms:
        return "few"
    return "shortest" if kv_len <= SHORTEST_KEYS else "short"


def scores(features: Features) -> tuple[str, ...]:
    """Returns `scores` of a spec. With fp8 q, a scale alone is no step whatever its sign: it is applied per row and by
    softmax.
    """
    steps = score_steps(features)
    return () if features.q_dtype in FP8 and steps == ("scale",) else steps


def operands(features: Features) -> Operands:
    """Return what q, k and v are."""
    if rotates(features):
        return "rope"
    return "fp8" if features.q_dtype in FP8 else "fp8_kv" if features.kv_dtype != features.q_dtype else ""


def section_heads(features: Features, heads: int, kv_len: int, launch: Launch = "") -> int:
    """Return the blocks of `heads` query heads in an L2 section of a launch: those of as many kv heads as it
    holds, at least one, rounded down to a divisor of all blocks.
    """
    head_blocks = features.num_qo_heads // heads
    blocks_per_kv = features.num_qo_heads // features.num_kv_heads // heads
    blocks = min(head_blocks, max(1, section_tokens(features, launch) // max(kv_len, 1)) * blocks_per_kv)
    while head_blocks % blocks:
        blocks -= 1
    return blocks


def section_tokens(features: Features, launch: Launch) -> int:
    """Return how many tokens of one kv head an L2 section of a launch holds."""
    dims = features.head_dim_qk + features.head_dim_vo
    if features.kv_block_scales:
        return NVFP4_SECTION_BYTES // (dims // 2 + dims // 16)
    section = SHORT_SECTION_BYTES if launch in ("short", "shortest") else SECTION_BYTES
    return section // (dims * features.kv_dtype.itemsize)
