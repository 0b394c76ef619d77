"""Tile table of the decode kernel: tokens of a warp's tile, warps, stages, query rows that share a read of K and V."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.rules import Rule, above, first, steps, up_to
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import (
    PAIRED_ROWS,
    SCALE_BLOCK,
    WARP_DIM,
    WHOLE,
    Work,
    XqaSpec,
    padded_dim,
)
from cute_attn.kernels.xqa.umma.tiles import ONE_READ_ROWS
from cute_attn.runtime.arch import Arch

REGISTER_DIMS = 256  # row blocks x columns of a warp; beyond it outputs and queries exceed a thread's registers
RESERVED_SMEM = 1024  # bytes of shared memory that the system reserves per CTA
SHORTEST = 144  # keys of a window of 128 and of drafts
SHORT = 512  # keys of a segment that one CTA processes alone, see `partition.WholeSegments`
MOST_ROWS = 16  # of a unit
FEW = 128  # (request, kv head) pairs: about one per SM
WAVE = 528  # pairs: as many as CTAs of 4 warps run at a time on 132 SMs
EVEN = 2048  # pairs, about one for each warp that runs at a time, from which warps have shares of their own
DEALT = 36  # positions of a segment that CTAs take whole as they become free, see `parts.tickets`


class Shape(NamedTuple):
    """What is known of a launch when its kernel is chosen. None: not known."""

    requests: int
    kv_heads: int = 1
    keys: int | None = None  # most keys of a segment, in all launches: of a request, or within its window
    rows: int = 1  # packed query rows of a request and kv head

    def numbers(self, head_dim: int) -> dict[str, int]:
        """Return the numbers that rules name: `units` of a request have at most MOST_ROWS rows, segments as many as a
        CTA has at a time."""
        pairs, most = self.requests * self.kv_heads, 8 * _row_blocks(head_dim, REGISTER_DIMS)
        units = self.kv_heads * -(-self.rows // MOST_ROWS)
        segments = pairs * -(-self.rows // most)
        return {"requests": self.requests, "pairs": pairs, "units": units, "segments": segments, "rows": self.rows}


def _row_blocks(head_dim: int, register_dims: int) -> int:
    return max(1, min(2, register_dims // padded_dim(head_dim)))


class Ring(NamedTuple):
    warps: int
    stages: int
    ctas: int  # per SM
    slot: int  # approximate bytes of K and V per tile
    guests: int = 0  # see `XqaSpec`
    most: int = 64  # tokens of a tile
    work: Work = "shares"
    cluster_size: int = 1
    prefetch: int = 0  # tiles of a warp

    def ahead(self, tiles: int = 1) -> Ring:
        """The ring with tiles fetched ahead; shares guess their first segment for that (`parts.tickets`)."""
        return self._replace(prefetch=tiles)

    def in_clusters(self, size: int) -> Ring:
        """The ring in clusters of so many CTAs."""
        return self.ahead()._replace(work="cluster", cluster_size=size)


Rings = tuple[Ring, ...]  # in order of preference; none: the kernel on tcgen05


def _rule(*rings: Ring, note: str = "", **when: Collection[Any]) -> Rule[Rings]:
    return Rule(rings, when, note)


def _clusters(size: int, ring: Ring, note: str, **when: Collection[Any]) -> Rule[Rings]:
    """Make a rule of clusters of `size` CTAs, which share segments up to head dim 256. Over rows of 512 bytes all have
    fewer warps, and no guest; more than 6 CTAs of them are slower."""
    wide = _DEEP.in_clusters(min(size, 6))
    return _rule(ring.in_clusters(size), wide, note=note, **when, head_dim=up_to(WARP_DIM))


# A launch takes the first ring of its rule that fits shared memory and registers, and keeps enough bytes on their way
# to an SM. One CTA per SM has the fewest segments to cut and to merge; several hide each other's prologues and
# epilogues, which pays for NVFP4, whose warps compute longest. Few pairs are split many ways: many warps have the least
# to do after their last bytes arrive, and room for a guest lets the next launch start meanwhile.
_LARGE, _DEEP = Ring(8, 2, 1, 8192), Ring(4, 3, 1, 8192)
OTHER_RINGS = (
    Ring(4, 3, 2, 8192),
    Ring(4, 2, 2, 8192),
    _DEEP,
    Ring(4, 2, 1, 8192),
    Ring(2, 2, 1, 8192),
)
_SHORTS, _WINDOWS = up_to(SHORT), up_to(SHORTEST)  # keys
_FEW_PAIRS, _NARROW = up_to(FEW), up_to(128)  # bytes of a row of K
_WHOLE_MEASURED = "measured by `perf.tune decode-windows`"
_SHORT = (
    _rule(Ring(2, 2, 8, 2048, work="whole"), row=up_to(32), keys=_SHORTS, note=_WHOLE_MEASURED),
    _rule(Ring(2, 2, 8, 4096, work="whole"), row=up_to(64), keys=_SHORTS, note=_WHOLE_MEASURED),
    _rule(Ring(4, 2, 4, 4096, work="whole"), row=_NARROW, keys=_SHORTS, note=_WHOLE_MEASURED),
    _rule(Ring(4, 3, 2, 8192, work="whole"), keys=_SHORTS, note=_WHOLE_MEASURED),
)
_MEASURED = "measured by `perf.tune decode` (H100, H200)"
_FEW_NVFP4 = _rule(Ring(8, 2, 1, 4096, guests=1), Ring(8, 3, 1, 4096), pairs=_FEW_PAIRS, note=_MEASURED)
_MANY_NVFP4 = _rule(Ring(2, 2, 2, 8192), note=_MEASURED)
_FEW_8_BIT = Ring(8, 3, 1, 4096, guests=1), Ring(8, 3, 1, 4096)
DEFAULT: dict[int, tuple[Rule[Rings], ...]] = {
    16: (*_SHORT, _rule(_LARGE, pairs=_FEW_PAIRS, note=_MEASURED), _rule(_DEEP, note=_MEASURED)),
    8: (*_SHORT, _rule(*_FEW_8_BIT, pairs=_FEW_PAIRS, note=_MEASURED), _rule(_LARGE, note=_MEASURED)),
    4: (*_SHORT, _FEW_NVFP4, _MANY_NVFP4),
}
# For 8 TB/s over 148 SMs, of which none has been measured: what arrives in 1 us is 54 KB. At that rate NVFP4 leaves 20
# issue slots per token. Those that a tile takes whatever its size are spread over more tokens here.
_UMMA = tuple(_rule(head_dim=(dim,), rows=above(most)) for dim, most in ONE_READ_ROWS.items())
FAST_MEMORY: dict[int, tuple[Rule[Rings], ...]] = {
    16: (*_UMMA, *_SHORT, _rule(Ring(8, 3, 1, 8192), pairs=_FEW_PAIRS), _rule(Ring(4, 3, 2, 8192))),
    8: (*_UMMA, *_SHORT, _rule(*_FEW_8_BIT, Ring(8, 3, 1, 8192), pairs=_FEW_PAIRS), _rule(Ring(8, 3, 1, 8192))),
    4: (*_SHORT, _rule(Ring(8, 3, 1, 8192), pairs=_FEW_PAIRS), _rule(Ring(4, 3, 2, 8192, most=128))),
}
# Of clusters, with room for a guest.
_QUICK = Ring(4, 3, 1, 8192, guests=1, most=32)
# Small CTAs: a segment, or a kv head for each warp, of one segment or in shares.
_SMALL, _PAIR, _TWO = Ring(4, 2, 4, 4096, most=32), Ring(2, 2, 8, 4096), Ring(4, 3, 2, 8192)
_HEADS, _EVEN = _PAIR.ahead()._replace(work="heads"), _PAIR._replace(work="even")
_LONE, _DUAL = Ring(1, 3, 8, 8192).ahead(), Ring(2, 3, 4, 8192).ahead()
_ONE = range(1, 2)  # request


def _whole(ring: Ring) -> Ring:
    """Return the ring for segments that one CTA processes alone."""
    return ring._replace(work="whole")


_SMALLEST, _AHEAD = _whole(_SMALL._replace(most=16)).ahead(3), _whole(Ring(8, 2, 2, 4096)).ahead()


# On 97 launches drawn after the first fit 1.075 times as fast as 45 rules that were measured one by one; of 8 us and
# more, 0.84 at the lowest (300 x 175, 16/4 heads of 64 dimensions, e4m3).
_FIT = "fitted to 120 launches with some 30 rings each: 0.98 of the best speed in the mean (H200, 2026-11-29)"
_CLUSTER_FIT = "fitted to 81 launches of up to 64 segments with some 8 rings each (H200, 2026-11-29)"
_SHORT_FIT = "fitted to 176 launches with some 7 rings each (H200, 2026-11-30)"
_MANY_WINDOWS = "532 of 16 rows in 8 bits take 13.6 us instead of 16.8, 972 14.6 instead of 26.2 (H200, 2026-11-30)"
_LONE_SHORT = "2048 keys of 8 kv heads in 8 bits take 4.4 us with 4 warps, 5.2 with 8 (H200)"
_LONE_LONG = "131072 keys of 8 kv heads in 8 bits take 67.5 us with 8 warps, 79 with 4 (H200)"
_NEXT_LAUNCH = "room for the next launch gains 1.16, but 0.8 over long keys of unequal lengths (H200, 2026-11-30)"
_TILE_AHEAD = "a tile ahead gains 1.07 where all CTAs run at a time (H200, 2026-11-30)"
_GUESS = "a guessed first segment gains 1.06 to 1.64 where all are short, and loses 0.92 beyond 528 (H200, 2026-11-30)"
_CUT = "1.09 (64 x 2048 keys) to 1.56 (256 x 3368 to 16539); of fewer pairs, whose segments it would cut, 0.74 (H200)"
_16_OR_8_BITS = (
    # Windows of 128 keys. Few are fetched ahead; many have a warp or two each.
    _rule(_SMALLEST, _whole(_TWO).ahead(3), keys=_WINDOWS, pairs=_FEW_PAIRS, note=_SHORT_FIT),
    _rule(_SMALLEST, _whole(_DUAL), keys=_WINDOWS, pairs=up_to(2 * FEW), note=_SHORT_FIT),
    _rule(_HEADS, _whole(_SMALL), _whole(_LONE), keys=_WINDOWS, row=_NARROW, pairs=above(WAVE), note=_MANY_WINDOWS),
    _rule(_whole(_SMALL).ahead(), _whole(_DUAL), keys=_WINDOWS, note=_SHORT_FIT),
    # Few segments: as many clusters as there are segments, or more.
    _clusters(8, _QUICK, _LONE_SHORT, requests=_ONE, units=up_to(8), keys=up_to(8192)),
    _clusters(6, _LARGE, _LONE_LONG, requests=_ONE, units=range(2, 9)),
    _clusters(8, _QUICK, _CLUSTER_FIT, segments=up_to(12)),
    _rule(_AHEAD, _whole(_TWO).ahead(), keys=_SHORTS, pairs=up_to(2 * FEW), row=range(65, 129), note=_SHORT_FIT),
    _clusters(4, _QUICK, _NEXT_LAUNCH, keys=up_to(2 * SHORT), segments=up_to(24)),
    _clusters(2, _QUICK, _NEXT_LAUNCH, keys=up_to(2 * SHORT), segments=up_to(64)),
    *(_clusters(size, _LARGE, _CLUSTER_FIT, segments=up_to(most)) for size, most in ((6, 16), (4, 24), (2, 64))),
    # Short segments.
    _rule(_whole(_SMALL).ahead(), _whole(_TWO).ahead(), keys=_SHORTS, pairs=up_to(WAVE), note=_TILE_AHEAD),
    _rule(_HEADS, _whole(_PAIR), keys=_SHORTS, row=_NARROW, pairs=above(EVEN - 1), note=_SHORT_FIT),
    _rule(_whole(_SMALL), _whole(_TWO), keys=_SHORTS, note=_SHORT_FIT),
    _rule(_whole(_TWO), keys=up_to(2 * SHORT), segments=above(4 * FEW - 1), row=range(129, 257), note=_SHORT_FIT),
    # Few pairs; shares of warps; others.
    _rule(*(ring.ahead() for ring in _FEW_8_BIT), pairs=_FEW_PAIRS, row=up_to(64), note=_GUESS),
    _rule(_LARGE.ahead(), pairs=_FEW_PAIRS, note=_GUESS),
    _rule(_EVEN, _SMALL, _TWO, pairs=above(4 * FEW - 1), row=up_to(64), note=_CUT),
    _rule(_EVEN, _SMALL, _TWO, pairs=above(EVEN - 1), row=range(128, 129), note=_FIT),
    _rule(_TWO, keys=up_to(2 * SHORT), note=_SHORT_FIT),
    _rule(_SMALL.ahead(), _TWO.ahead(), pairs=up_to(WAVE), note=_GUESS),
    _rule(_SMALL, _TWO, note=_FIT),
)
_CLUSTERED_NVFP4 = Ring(4, 3, 1, 4096, guests=1).in_clusters(8).ahead(0)  # block scales are not fetched
HOPPER: dict[int, tuple[Rule[Rings], ...]] = {
    16: _16_OR_8_BITS,
    8: _16_OR_8_BITS,
    4: (
        _rule(_CLUSTERED_NVFP4, requests=_ONE, units=up_to(4), note=_MEASURED),
        *_SHORT,
        _rule(_CLUSTERED_NVFP4, segments=up_to(12), note=_MEASURED),
        _FEW_NVFP4,
        _MANY_NVFP4,
    ),
}
# By major compute capability (0: others), which tells memory bandwidth and shared memory of an SM, and bits per element
# of the cache.
RULES = {
    (major, bits): rules
    for major, of_bits in {9: HOPPER, 10: FAST_MEMORY, 0: DEFAULT}.items()
    for bits, rules in of_bits.items()
}
PER_STEP = "requests", "pairs", "segments"  # what varies with the requests of a step of an engine, beside keys
STEPS = {name: steps([rule for rules in RULES.values() for rule in rules], name) for name in ("keys", *PER_STEP)}
IN_FLIGHT = {10: 64 << 10}  # bytes that a ring keeps on their way to an SM, likewise


def rules_of(arch: Arch, bits: int) -> tuple[Rule[Rings], ...]:
    """Return the rules for a cache of `bits` per element, of which the first that applies decides."""
    return RULES.get((arch.capability[0], bits), RULES[0, bits])


def find(arch: Arch, bits: int, head_dim: int, shape: Shape) -> Rule[Rings]:
    """Return the rule that a launch follows over a cache of `bits` per element."""
    known = {"keys": shape.keys, "head_dim": head_dim, "row": head_dim * bits // 8, **shape.numbers(head_dim)}
    return first(rules_of(arch, bits), known)


def rules(arch: Arch, bits: int, head_dim: int, rows: int | None = None) -> list[Rule[Rings]]:
    """Return every rule that a launch may follow over a cache of `bits` per element. `rows` None: those of rings."""
    found: list[Rule[Rings]] = []
    of_cache = {"head_dim": head_dim, "row": head_dim * bits // 8, "rows": rows}
    for rule in rules_of(arch, bits):
        asked = {name: value for name, value in of_cache.items() if name in rule.when}
        possible = all(value is not None and value in rule.when[name] for name, value in asked.items())
        if possible and not any(earlier.covers(rule, of_cache) for earlier in found):
            found.append(rule)
    return found


def choose(
    q_dtype: str, kv_dtype: str, out_dtype: str, head_dim: int, packed_rows: int, tree: bool,
    rule: Rule[Rings], arch: Arch, num_kv_heads: int = 1,
) -> XqaSpec:  # fmt: skip
    """Choose the kernel for `packed_rows` = q_len * group rows by a rule for the cache. Rings whose warps have a unit
    each are for multiples of so many kv heads."""
    software = KV_BITS[kv_dtype] == 4 and not arch.converts_e4m3  # scales: software takes registers too
    row_blocks = min(_row_blocks(head_dim, REGISTER_DIMS // (2 if software else 1)), max(1, -(-packed_rows // 8)))
    # Blocks that lanes read whole take fewer instructions than pairs.
    paired = kv_dtype == "nvfp4" and packed_rows <= PAIRED_ROWS and not (arch.converts_e2m1 and head_dim >= 128)
    work: Work = "whole" if rule.value[-1].work in WHOLE else "shares"
    specs = [
        XqaSpec(
            q_dtype, kv_dtype, out_dtype, head_dim, tree, row_blocks, _cols(kv_dtype, head_dim, row_blocks, r),
            r.warps, r.stages, r.ctas, paired, r.guests, r.work, r.cluster_size, r.prefetch,
        )
        for r in (*rule.value, *(ring._replace(work=work) for ring in OTHER_RINGS))
        if head_dim <= WARP_DIM or r.work in ("shares", "whole")
    ]  # fmt: skip
    fitting = [spec for spec in specs if _fits(spec, arch) and num_kv_heads % spec.heads == 0]
    enough = IN_FLIGHT.get(arch.capability[0], 0)
    return next((spec for spec in fitting if in_flight(spec) >= enough), max(fitting, key=in_flight))


def in_flight(spec: XqaSpec) -> int:
    """Bytes of K, V and block scales on their way to an SM while its warps compute."""
    memory = XqaMemory(spec)
    token = 2 * (memory.source_bytes + memory.scale_bytes)
    return spec.ctas * spec.warps * memory.prefetch_distance * spec.cols * token


def _cols(kv_dtype: str, head_dim: int, row_blocks: int, ring: Ring) -> int:
    """Tokens of a tile. Outputs occupy slots during a merge: two slots must stay free, or one of two."""
    columns = padded_dim(head_dim)
    token = 2 * columns * KV_BITS[kv_dtype] // 8 + (2 * columns // SCALE_BLOCK if kv_dtype == "nvfp4" else 0)
    outputs = 8 * row_blocks * columns * 4
    needed, cols = outputs // max(1, ring.stages - 2), 16
    while cols * token < needed or (cols < ring.most and cols * token < ring.slot * 3 // 4):
        cols *= 2
    return cols


def _fits(spec: XqaSpec, arch: Arch) -> bool:
    """Whether the CTAs of an SM fit together. Their shared memory, with what the system reserves for each, is limited
    to that of the largest single CTA. In the 128 registers per thread that 16 warps per SM leave, scores of more than
    32 tokens spill; in 168, tree masks and twice as many outputs or scores."""
    ctas = spec.ctas + spec.guests
    warps = spec.warps * ctas
    wide = spec.tree or spec.row_blocks * spec.cols > 32 or spec.row_blocks * spec.tile_dim >= REGISTER_DIMS
    if (warps >= 16 and spec.cols > 32) or (warps >= 12 and wide):
        return False
    return ctas * (XqaMemory(spec).bytes + RESERVED_SMEM) <= arch.smem_limit + RESERVED_SMEM
