"""Specs and tiles of a family of persistent kernels, for problems of given settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cute_attn.kernels.blocks.persistent_spec import PersistentSpec, PersistentTile
from cute_attn.kernels.blocks.tiles import (
    LONG_TOKENS,
    SHORT_KEYS,
    SHORTEST_KEYS,
    Launch,
    Operands,
    TileProblem,
    tile_rows,
)
from cute_attn.kernels.host.features import batched, combine_spec, kv_dtype, schedule, score_steps
from cute_attn.problem import Features, Settings, short
from cute_attn.request.settings import FP8, MAX_KV_LEN
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

SMALL_PAGE, LARGE_PAGE = 1, 128  # tokens: every page size has the kernels of one of these
SECTION_BYTES = 32 << 20  # keys and values of an L2 section
# The same in launches of short requests: 1.01 to 1.07 times as fast as sections of 32 MiB on 16 x 1024 causal tokens,
# where longer requests lose up to 1.3 % (H100).
SHORT_SECTION_BYTES = 16 << 20
NVFP4_SECTION_BYTES = 18 << 20  # the same with their block scales: as many tokens as of 8 bits, which was measured
WINDOWS = (-1, 0, MAX_KV_LEN)  # none, the shortest and the longest: every window has the tile of one of them
FEW_ROWS = 2 * 128  # query rows per SM up to which a launch of short requests has few
UNKNOWN_LAUNCH = Launch()
LAUNCHES = (  # all that `launch_of` tells
    *(Launch(kv_len=SHORT_KEYS, few=True), Launch(kv_len=SHORTEST_KEYS), Launch(kv_len=SHORT_KEYS)),
    *(UNKNOWN_LAUNCH, Launch(LONG_TOKENS)),
)

T = TypeVar("T", bound=PersistentTile)


@dataclass(frozen=True, eq=False)
class PersistentKernels(Generic[T]):
    """What the host code of persistent kernels asks a family. Compared by identity: it is part of keys."""

    name: str
    spec_type: Callable[..., PersistentSpec]
    page_source: Callable[[tuple[int, int], int, Operands], str]  # from head dims and page size to `kv` of a spec
    choose_tile: Callable[[str, TileProblem], T]  # from an architecture
    packs_any_group: bool = False  # whether heads share tiles whose rows their number does not divide

    def spec(self, settings: Settings, tile: T, split: bool) -> PersistentSpec:
        """Returns the kernel that solves problems of these settings with this tile. `split`: the keys of a single
        request are split.
        """
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
        return self.page_source(head_dims(features), settings.page_size, operands(features))

    def tile(self, settings: Settings, arch: str, launch: Launch = UNKNOWN_LAUNCH) -> T:
        """Return the tile of these settings on an architecture, for a launch."""
        features, causal, window_left = settings.features, settings.causal, settings.window_left
        masked = features.custom_mask or features.multi_item
        modified, window = masked or bool(scores(features)), window_left >= 0
        problem = TileProblem(
            head_dims(features),
            self.kv_source(settings),
            operands(features),
            plain=not (modified or window),
            full=not (masked or window or causal),
            window_left=window_left if causal and not modified else -1,
            group=features.num_qo_heads // features.num_kv_heads,
            launch=launch,
            chunk_invariant=features.chunk_invariant,
        )
        return self.choose_tile(arch, problem)

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
        """Returns every kernel that calls of these features may need, whatever their lengths."""
        kernels: list[KernelSpec] = [
            self.spec(settings, self.tile(settings, arch.name, launch), split)
            for window, causal, page_size in itertools.product(WINDOWS, (True, False), (SMALL_PAGE, LARGE_PAGE))
            for settings in (Settings(features, causal=causal, window_left=window, page_size=page_size),)
            for launch in LAUNCHES
            for split in ((False,) if batched(features) else (False, True))
        ]
        return [*dict.fromkeys(kernels), combine_spec(features)]


def launch_of(rows: int, sms: int, qo_len: int, kv_len: int) -> Launch:
    """Return which of LAUNCHES a launch is. `rows`: query rows of all heads and requests; `qo_len`: query tokens of a
    typical request; `kv_len`: keys of the longest.
    """
    if kv_len <= SHORT_KEYS:
        few = rows <= FEW_ROWS * sms
        return Launch(kv_len=SHORTEST_KEYS if kv_len <= SHORTEST_KEYS and not few else SHORT_KEYS, few=few)
    return Launch(LONG_TOKENS) if qo_len >= LONG_TOKENS else UNKNOWN_LAUNCH


def scores(features: Features) -> tuple[str, ...]:
    """Returns `scores` of a spec. With fp8 q, a scale alone is no step whatever its sign: it is applied per row and by
    softmax.
    """
    steps = score_steps(features)
    return () if features.q_dtype in FP8 and steps == ("scale",) else steps


def rotates(features: Features) -> bool:
    """Tells whether q and k are rotated."""
    return features.pos_encoding_mode == "ROPE_LLAMA"


def operands(features: Features) -> Operands:
    """Return what q, k and v are."""
    if rotates(features):
        return "rope"
    return "fp8" if features.q_dtype in FP8 else "fp8_kv" if features.kv_dtype != features.q_dtype else ""


def head_dims(features: Features) -> tuple[int, int]:
    return features.head_dim_qk, features.head_dim_vo


def section_heads(features: Features, heads: int, kv_len: int, launch: Launch = UNKNOWN_LAUNCH) -> int:
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
    short = launch.kv_len <= SHORT_KEYS and not launch.few
    return (SHORT_SECTION_BYTES if short else SECTION_BYTES) // (dims * features.kv_dtype.itemsize)
