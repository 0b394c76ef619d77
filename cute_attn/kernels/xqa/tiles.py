"""Tile table of the decode kernel: tokens of a warp's tile, warps, stages, query rows that share a read of K and V."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.rules import Rule, above, first, up_to
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import (
    PAIRED_ROWS,
    SCALE_BLOCK,
    WARP_DIM,
    WHOLE,
    Prefetch,
    Work,
    XqaSpec,
    padded_dim,
)
from cute_attn.runtime.arch import Arch

REGISTER_DIMS = 256  # row blocks x columns of a warp; beyond it outputs and queries exceed a thread's registers
RESERVED_SMEM = 1024  # bytes of shared memory that the system reserves per CTA
SHORT = 512  # keys of a segment that one CTA processes alone, see `partition.WholeSegments`
CLUSTERED_KEYS = 4096  # keys of a segment that has a cluster, where there are few
MOST_ROWS = 16  # of a unit
FEW = 128  # (request, kv head) pairs: about one per SM
EVEN = 2048  # pairs, about one for each warp that runs at a time, from which warps have shares of their own
DEALT = 36  # positions of a segment that CTAs take whole as they become free, see `parts.tickets`
LONG = 65536  # keys of one request of 5 to 8 kv heads of 16 bits that clusters do not read faster


class Shape(NamedTuple):
    """What is known of a launch when its kernel is chosen. None: not known."""

    requests: int
    kv_heads: int = 1
    units: int = 1  # of one request: blocks of at most MOST_ROWS rows of a kv head
    keys: int | None = None  # most keys of a segment, in all launches: of a request, or within its window
    segments: int | None = None  # of blocks of at most `most_rows` rows; None: requests x units
    mean: int | None = None  # keys of a segment on average, at most


def most_rows(head_dim: int) -> int:
    """Return the most packed query rows that a CTA has at a time."""
    return 8 * _row_blocks(head_dim, REGISTER_DIMS)


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
    prefetch: Prefetch = "none"
    prefetch_keys: int = 0

    def in_clusters(self, size: int) -> Ring:
        """The ring in clusters of so many CTAs."""
        return self._replace(work="cluster", cluster_size=size)

    def to_l2(self, keys: int) -> Ring:
        """The ring in CTAs that prefetch so many keys to L2."""
        return self._replace(prefetch="l2", prefetch_keys=keys)

    def to_smem(self, keys: int) -> Ring:
        """The ring in CTAs that prefetch so many keys to L2, and of these the first tiles to shared memory."""
        return self._replace(prefetch="smem", prefetch_keys=keys)


Rings = tuple[Ring, ...]  # in order of preference


def _rule(bits: int, *rings: Ring, **when: Collection[Any]) -> tuple[int, Rule[Rings]]:
    """Make a rule of launches over caches of some bits per element."""
    return bits, Rule(rings, when)


# A launch takes the first ring of its rule that fits shared memory and registers, and keeps enough bytes on their way
# to an SM. One CTA per SM has the fewest segments to cut and to merge; several hide each other's prologues and
# epilogues, which pays for NVFP4, whose warps compute longest. Few pairs are split many ways: many warps have the least
# to do after their last bytes arrive, and room for a guest lets the next launch start meanwhile.
_LARGE, _DEEP, _WITH_GUEST = Ring(8, 2, 1, 8192), Ring(4, 3, 1, 8192), Ring(4, 3, 1, 8192, guests=1)
OTHER_RINGS = (
    Ring(4, 3, 2, 8192),
    Ring(4, 2, 2, 8192),
    _DEEP,
    Ring(4, 2, 1, 8192),
    Ring(2, 2, 1, 8192),
)
# Of short segments, by the most bytes of a row of K (`python -m perf.tune decode-windows`).
_SHORT_RINGS = {
    32: Ring(2, 2, 8, 2048, work="whole"),
    64: Ring(2, 2, 8, 4096, work="whole"),
    128: Ring(4, 2, 4, 4096, work="whole"),
    1024: Ring(4, 3, 2, 8192, work="whole"),
}
_SHORT = tuple(
    _rule(bits, ring, head_dim=range(1, size * 8 // bits + 1), keys=up_to(SHORT))
    for bits in (16, 8, 4)
    for size, ring in _SHORT_RINGS.items()
)
# Measured on H100 and H200 (`python -m perf.tune decode`).
_FEW = (
    _rule(16, _LARGE, pairs=up_to(FEW)),
    _rule(8, Ring(8, 3, 1, 4096, guests=1), Ring(8, 3, 1, 4096), pairs=up_to(FEW)),
    _rule(4, Ring(8, 2, 1, 4096, guests=1), Ring(8, 3, 1, 4096), pairs=up_to(FEW)),
)
_MANY = _rule(16, _DEEP), _rule(8, _LARGE), _rule(4, Ring(2, 2, 2, 8192))
DEFAULT = (*_SHORT, *_FEW, *_MANY)
# For 8 TB/s over 148 SMs, of which none has been measured: what arrives in 1 us is 54 KB. At that rate NVFP4 leaves 20
# issue slots per token. Those that a tile takes whatever its size are spread over more tokens here.
FAST_MEMORY = (
    *_SHORT,
    _rule(16, Ring(8, 3, 1, 8192), pairs=up_to(FEW)),
    _rule(8, Ring(8, 3, 1, 4096, guests=1), Ring(8, 3, 1, 4096), Ring(8, 3, 1, 8192), pairs=up_to(FEW)),
    _rule(4, Ring(8, 3, 1, 8192), pairs=up_to(FEW)),
    _rule(16, Ring(4, 3, 2, 8192)),
    _rule(8, Ring(8, 3, 1, 8192)),
    _rule(4, Ring(4, 3, 2, 8192, most=128)),
)
# Head dims. Rings that were measured at one are for that.
_CLUSTERED, _WIDE = {"head_dim": range(1, WARP_DIM + 1)}, {"head_dim": range(129, WARP_DIM + 1)}
_NARROW, _MEASURED = {"head_dim": range(64, 65)}, {"head_dim": range(128, 129)}
# A kv head for each warp, or a CTA.
_WHOLE_HEADS = Ring(2, 2, 8, 4096, work="heads"), Ring(2, 2, 8, 4096, work="whole")
# A share of a kv head's keys for each warp.
_EVEN = Ring(2, 2, 8, 4096, work="even")
# Small CTAs, of rows that registers of so many warps hold, or large ones.
_MANY_8 = Ring(4, 2, 4, 4096), _LARGE.to_l2(128)
# A tile of a window of 128 keys for each of its warps: whatever is read arrives at once.
_FEW_OF_128 = Ring(4, 2, 4, 2048, work="whole").to_smem(SHORT)
# All tiles of such a window but one on their way, and no barrier behind them.
_HEADS_OF_128 = (
    Ring(4, 3, 2, 4096, work="heads").to_l2(SHORT),
    Ring(2, 2, 8, 4096, work="whole").to_smem(SHORT),
)
_MANY_OF_128 = Ring(2, 5, 4, 4096, work="heads").to_l2(SHORT), _SHORT_RINGS[64]
_FEW_OF_512 = Ring(8, 2, 2, 4096, work="whole").to_l2(SHORT)
# Windows of 128 keys, 8 kv heads, on an H100 and an H200, relative to CTAs of two warps with early tiles (8 bits, up to
# 64 requests) or to _SHORT. 8 bits: 8 requests 1.09 and 1.09, 16 0.99 and 1.02; 32 1.03 and 0.99, 64 1.07 and 1.05; 256
# 1.08 and 1.07. 16 bits: 8 requests 1.32 and 1.30, 16 1.18 and 1.15, 32 1.07 and 1.02. Windows of 512 keys, relative to
# _SHORT: 8 requests 1.33 and 1.39, 256 1.04 and 1.07; of 32 all rings with keys ahead are slower, 0.96 and less.
# Keys of a window of 128 and of drafts, which CTAs fetch ahead, all; of 512 keys that takes 1.7 times as long (H100).
_SHORTEST, _LONGER = up_to(144), range(145, SHORT + 1)
_HOPPER_WINDOWS = (
    _rule(8, _FEW_OF_128, **_NARROW, keys=_SHORTEST, pairs=up_to(FEW)),
    _rule(8, *_HEADS_OF_128, **_NARROW, keys=_SHORTEST, pairs=up_to(512)),
    _rule(8, *_MANY_OF_128, **_NARROW, keys=_SHORTEST, pairs=above(EVEN - 1)),
    _rule(16, _FEW_OF_128._replace(slot=4096), **_NARROW, keys=_SHORTEST, pairs=up_to(256)),
    _rule(8, _FEW_OF_512, **_MEASURED, keys=_LONGER, requests=above(1), pairs=up_to(FEW)),
    _rule(8, *_WHOLE_HEADS, **_MEASURED, keys=_LONGER, pairs=above(EVEN - 1)),
)
# One request, whose units have clusters of their own. Of 6 CTAs more clusters run at once than of 8, whose GPC leaves
# SMs over. us without and with keys ahead or a guest: 1 x 8192, 8/1 heads, bf16 6.9 and 6.5, 8 bits 6.6 and 5.8; 28/4
# heads, 8 bits 9.4 and 7.7 (H100); bf16 9.6 on an H100, 8.5 on an H200, with four warps, three stages and a guest 9.8
# and 8.9. 8 kv heads: one cluster of 8 a unit merges once, and leaves the CTAs of the next launch SMs of their own.
# H100, H200: bf16, 2048 keys 6.5, 6.0 us instead of 7.3, 6.8 by 12 CTAs a unit; 8192 15.6, 13.2 instead of 16.2, 13.3.
# 8 bits, 131072 keys: 88 instead of 69 us (H200).
_ONE, _SEVERAL = range(1, 2), range(5, 9)  # requests or units; units
_ALONE, _FOUR, _EIGHT = ({"requests": _ONE, "units": units} for units in (_ONE, up_to(4), up_to(8)))
_FIVE_TO_8 = {**_MEASURED, "requests": _ONE, "units": _SEVERAL}
_SMALL, _CLUSTER_8 = Ring(8, 2, 1, 4096, guests=1), Ring(8, 3, 1, 4096, guests=1).in_clusters(8).to_l2(64)
_HOPPER_ONE = (
    _rule(16, _LARGE.in_clusters(8).to_smem(16), **_MEASURED, **_ALONE),
    _rule(16, _LARGE.in_clusters(8), _DEEP.in_clusters(8), **_CLUSTERED, **_ALONE),
    _rule(16, _WITH_GUEST.in_clusters(8).to_smem(64), **_FIVE_TO_8, keys=up_to(2048)),
    _rule(16, _WITH_GUEST.in_clusters(8).to_smem(16), **_FIVE_TO_8, keys=up_to(8192)),
    _rule(16, _LARGE, **_FIVE_TO_8, pairs=_SEVERAL, keys=above(LONG)),
    _rule(16, _LARGE.in_clusters(6).to_smem(16), **_MEASURED, **_EIGHT),
    _rule(16, _WITH_GUEST.in_clusters(6), _DEEP.in_clusters(6), **_CLUSTERED, **_EIGHT),
    _rule(8, _CLUSTER_8, **_MEASURED, **_FOUR),
    _rule(8, Ring(8, 4, 1, 4096).in_clusters(8), Ring(8, 3, 1, 4096).in_clusters(8), **_CLUSTERED, **_FOUR),
    _rule(8, _SMALL.in_clusters(8).to_l2(128), **_FIVE_TO_8, keys=up_to(2048)),
    _rule(8, _CLUSTER_8, **_FIVE_TO_8, keys=up_to(8192)),
    _rule(4, Ring(8, 3, 1, 4096).in_clusters(8), **_CLUSTERED, **_FOUR),
)
# Few segments, none of them long (mostly windows), have a cluster each. The more segments, the fewer CTAs of a cluster:
# no cluster should wait for another. It saves a merge in global memory and the search for a share, 3 us. Windows of
# 1024 and 4096 keys, times as fast as shares (head dim 256 over 16 bits: as fa2). H200: 8 bits, 8 to 16 segments 1.17
# to 1.80, 64 1.24; 16 bits, 10 to 16 1.24 to 1.71, 64 1.16; head dim 256, 8 to 16 1.16 to 1.62, 24 and 32 1.24 and
# 1.19. H100: head dim 64, 16 1.16 to 1.64, 32 and 64 1.26 and 1.29; 32 segments of head dim 128 over 16 bits 1.33, but
# 0.90 in clusters of 4.
_FEW_RINGS = (  # bits, head dims, most segments, ring
    (8, _NARROW, 16, Ring(4, 3, 1, 2048, guests=1).in_clusters(8).to_smem(64)),
    (8, _NARROW, 64, Ring(8, 3, 1, 2048, guests=1).in_clusters(2)),
    (8, _MEASURED, 16, Ring(4, 3, 1, 4096, guests=1).in_clusters(8).to_smem(64)),
    (8, _MEASURED, 32, Ring(4, 3, 1, 4096, guests=1).in_clusters(4).to_smem(64)),
    (8, _MEASURED, 64, Ring(8, 3, 1, 4096, guests=1).in_clusters(2)),
    (8, _WIDE, 12, Ring(4, 2, 1, 8192, guests=1).in_clusters(8)),
    (16, _NARROW, 16, Ring(4, 3, 1, 4096, guests=1).in_clusters(8).to_smem(64)),
    (16, _NARROW, 64, Ring(8, 3, 1, 4096, guests=1).in_clusters(2)),
    (16, _MEASURED, 10, _WITH_GUEST.in_clusters(8).to_smem(64)),
    (16, _MEASURED, 24, _WITH_GUEST.in_clusters(4).to_l2(64)),
    (16, _MEASURED, 32, _WITH_GUEST.in_clusters(6).to_smem(64)),
    (16, _MEASURED, 64, _LARGE.in_clusters(2)),
    (16, _WIDE, 12, Ring(4, 2, 1, 8192).in_clusters(8)),
    (16, _WIDE, 16, _DEEP.in_clusters(6)),
    (16, _WIDE, 24, _DEEP.in_clusters(4)),
    (16, _WIDE, 48, _DEEP.in_clusters(2)),
)
_HOPPER_FEW = tuple(
    _rule(bits, ring, ring._replace(warps=4, guests=0), **dims, keys=keys, segments=up_to(most))
    for bits, dims, most, ring in _FEW_RINGS
    for keys in (range(SHORT + 1 if ring.cluster_size == 2 else _LONGER.start, CLUSTERED_KEYS + 1),)
)
# Keys to L2: what a launch fetches while CTAs of the preceding one end, one after the other, its own would wait for.
# Tiles to shared memory, relative to that, H100 and H200: clusters over 16 bits, 1 x 2048 and 1 x 8192, 1.01 to 1.07
# times as fast, over 8 bits 0.94 to 0.98; 64 windows 1.02 and 0.98. Time lies in instructions as much as in latencies
# there.
HOPPER = (
    *_HOPPER_WINDOWS,
    *_HOPPER_ONE,
    *_HOPPER_FEW,
    *_SHORT,
    # Windows of 1024 keys, 688 segments, H200: 1.21 times as fast as shares, 1.06 as fa2; 512 of 1024 keys 1.03.
    _rule(16, _SHORT_RINGS[1024], **_MEASURED, keys=up_to(2 * SHORT), segments=above(4 * FEW - 1)),
    # 8 x 8192: 1.01 to 1.02 times as fast as the rings of long requests, 1 x 131072 0.98 (8 bits, H100).
    _rule(16, _LARGE.to_l2(256), **_MEASURED, requests=above(1), pairs=up_to(FEW)),
    _rule(8, _LARGE.to_l2(512), **_MEASURED, requests=above(1), pairs=up_to(FEW)),
    # H200, times as fast as one CTA per SM and none ahead: 8 to 88 segments 1.03 to 1.21; 240 1.31, 512 1.01.
    _rule(8, _LARGE.to_l2(128), **_WIDE, segments=up_to(FEW)),
    _rule(8, Ring(4, 2, 2, 8192).to_l2(128), **_WIDE),
    *_FEW,
    # To shares of large CTAs, lengths on the GPU, H100: 256 x 1024 1.066 (32/8 heads) and 1.075 (64/8), 512 x 512 1.09,
    # 256 x 8192 1.04, 256 x 200 to 1800 1.03, 256 x 64 to 4096 1.04. Over 16 bits 0.99 to 1.00.
    _rule(8, _EVEN, *_MANY_8, **_MEASURED, pairs=above(EVEN - 1)),
    # To 8 warps with stages of 8 KB, one CTA per SM, H200: 91 x 35 to 313 1.21 times as fast (16/4 heads), 195 x 142
    # 1.65, 128 x 512 1.12, 100 x 64 to 800 1.14 (32/8), 64 x 2048 1.01, 64 x 8192 0.99, 60 x 200 to 6000 0.99, 63 x 100
    # beside 1 x 16000 0.87. Head dim 64: 120 x 300 1.73 (8/8), 60 x 1000 1.05 (16/8), but 64 x 8192 0.92 (64/8).
    _rule(8, *_MANY_8, **_MEASURED),
    _rule(8, *_MANY_8, **_NARROW, mean=up_to(1024)),
    # To one CTA of 4 warps and 3 stages per SM, H200: 30 x 102 to 506 1.50 times as fast, 90 x 500 1.18, 100 x 300 to
    # 500 1.22; 4 CTAs 1.32, 1.12 and 1.17, and of longer requests, 40 x 300 to 5000, 64 x 8192, 200 x 2000, 1.03 to
    # 1.04, where 2 have 0.98 to 1.02.
    _rule(16, Ring(4, 3, 2, 8192), **_NARROW, mean=up_to(1024)),
    _rule(16, Ring(4, 2, 4, 4096), **_NARROW),
    # 13 batches of 384 to 2048 pairs, to one CTA per SM: 0.94 (48 x 500, 16/8 heads), others 1.00 to 1.15 (H200).
    _rule(16, Ring(4, 3, 2, 8192), **_MEASURED),
    *_MANY,
)
# By major compute capability (0: others), which tells memory bandwidth and shared memory of an SM, and bits per element
# of the cache.
RULES = {
    (major, bits): tuple(rule for of, rule in rules if of == bits)
    for major, rules in {9: HOPPER, 10: FAST_MEMORY, 0: DEFAULT}.items()
    for bits in (16, 8, 4)
}
IN_FLIGHT = {10: 64 << 10}  # bytes that a ring keeps on their way to an SM, likewise


def rules_of(arch: Arch, bits: int) -> tuple[Rule[Rings], ...]:
    """Return the rules for a cache of `bits` per element, of which the first that applies decides."""
    return RULES.get((arch.capability[0], bits), RULES[0, bits])


def find(arch: Arch, bits: int, head_dim: int, shape: Shape) -> Rule[Rings]:
    """Return the rule that a launch follows over a cache of `bits` per element."""
    known = {**shape._asdict(), "head_dim": head_dim, "pairs": shape.requests * shape.kv_heads}
    if shape.segments is None:
        known["segments"] = shape.requests * shape.units
    return first(rules_of(arch, bits), known)


def rules(arch: Arch, bits: int, head_dim: int) -> list[Rule[Rings]]:
    """Return every rule that a launch may follow over a cache of `bits` per element."""
    found: list[Rule[Rings]] = []
    for rule in rules_of(arch, bits):
        of_dim = head_dim in rule.when.get("head_dim", (head_dim,))
        if of_dim and not any(earlier.covers(rule, ("head_dim",)) for earlier in found):
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
            r.warps, r.stages, r.ctas, paired, r.guests, r.work, r.cluster_size, r.prefetch, r.prefetch_keys,
        )
        for r in (*rule.value, *(ring._replace(work=work) for ring in OTHER_RINGS))
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
    wanted = max(ring.slot * 3 // 4, outputs // max(1, ring.stages - 2))
    cols = 16
    while cols < ring.most and cols * token < wanted:
        cols *= 2
    return cols


def _fits(spec: XqaSpec, arch: Arch) -> bool:
    """Whether the CTAs of an SM fit together. Their shared memory, with what the system reserves for each, is limited
    to that of the largest single CTA. In the 128 registers per thread that 16 warps per SM leave, scores of more than
    32 tokens spill; in 168, tree masks and twice as many outputs or scores as usual."""
    ctas = spec.ctas + spec.guests
    warps = spec.warps * ctas
    wide = spec.tree or spec.row_blocks * spec.cols > 32 or spec.row_blocks * spec.tile_dim >= REGISTER_DIMS
    if (warps >= 16 and spec.cols > 32) or (warps >= 12 and wide):
        return False
    return ctas * (XqaMemory(spec).bytes + RESERVED_SMEM) <= arch.smem_limit + RESERVED_SMEM
