"""Specs of the decode kernel for problems of given features."""

from __future__ import annotations

from typing import get_args

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.host.features import kv_dtype
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.tiles import Segments, ShortSegments
from cute_attn.kernels.xqa.umma import tiles as umma_tiles
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.problem import Features, Settings, short
from cute_attn.request.settings import MAX_KV_LEN
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec
from cute_attn.schedule.split_kv import ceil_div

MAX_GRID_Y = 65535  # CTAs along the second axis of a grid


def segments(
    batch_size: int, settings: Settings, qo_len: int, longest: int = MAX_KV_LEN, even: bool = False
) -> Segments:
    """Returns what the pairs of a request and a kv head are: `short_segments` where a window bounds them, else those
    of "one" request ("alone": with one unit; with more units than ONE: "tiny" or "brief" if its keys are few, else
    "long"), "few", whose keys are split into many parts each, or "many". `longest`: most keys of a request, in all
    launches; `even`: requests are about equally long, and stay so; their pairs are "even" if there are enough.
    """
    window, features = settings.window_left, settings.features
    pairs = batch_size * features.num_kv_heads
    if 0 <= window <= tiles.SHORT - qo_len and batch_size <= MAX_GRID_Y:
        return short_segments(pairs, window)
    if batch_size == 1:
        return of_one_request(settings, qo_len, longest)
    if pairs <= tiles.FEW:
        return "few"
    return "even" if even and pairs >= tiles.EVEN and batch_size <= MAX_GRID_Y else "many"


def short_segments(pairs: int, window: int) -> ShortSegments:
    """Returns what `segments` says of so many pairs that windows of at most SHORT keys bound."""
    if window >= tiles.SHORTEST:
        return "few short" if pairs <= tiles.FEW else "short" if pairs < tiles.EVEN else "many short"
    if pairs <= tiles.SOME_SHORT:
        return "few shortest" if pairs <= tiles.FEW else "some shortest"
    if pairs <= tiles.MORE_SHORT:
        return "more shortest"
    return "short" if pairs < tiles.EVEN else "many shortest"


def of_one_request(settings: Settings, qo_len: int, longest: int) -> Segments:
    """Returns what `segments` says of one request of at most `longest` keys that no short window bounds."""
    features = settings.features
    units = features.num_kv_heads * ceil_div(qo_len * (features.num_qo_heads // features.num_kv_heads), tiles.MOST_ROWS)
    if units <= tiles.ONE:
        return "alone" if units == 1 else "one"
    if units <= tiles.BRIEF_UNITS and longest <= tiles.BRIEF:
        return "tiny" if longest <= tiles.TINY else "brief"
    if units <= tiles.BRIEF_UNITS and KV_BITS[kv_dtype(features)] == 16:
        return "one"
    return "long" if features.num_kv_heads <= tiles.FEW else "many"


def choose_spec(features: Features, qo_len: int, segments: Segments, arch: Arch) -> XqaSpec | XqaUmmaSpec:
    """Returns the kernel for `qo_len` query tokens per request."""
    rows = qo_len * (features.num_qo_heads // features.num_kv_heads)
    dtypes = short(features.q_dtype), kv_dtype(features), short(features.o_dtype)
    if umma_tiles.supports(dtypes[1], features.head_dim_qk, rows, arch):
        return umma_tiles.choose(*dtypes, features.head_dim_qk, rows, features.draft_mask, arch)
    shape = features.head_dim_qk, rows, features.draft_mask
    return tiles.choose(*dtypes, *shape, segments, arch, features.num_kv_heads)


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Returns every kernel that calls of one query token and of these features may need."""
    return list(dict.fromkeys(choose_spec(features, 1, of, arch) for of in get_args(Segments)))
