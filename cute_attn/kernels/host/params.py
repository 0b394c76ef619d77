"""Kernel parameters that settings decide, by field name, of the kernels of several families."""

from __future__ import annotations

import math

from cute_attn.problem import Settings

LOG2E = math.log2(math.e)
UNBOUNDED = 1 << 30  # no causal or window bound: beyond any kv index, and row + UNBOUNDED fits 32 bits

Fields = dict[str, int | float]

PARTIAL_FIELDS = ("o_partial", "lse_partial")
BATCH_FIELDS = ("items", *PARTIAL_FIELDS, "kv_indices")  # addresses of a batch's records, partials and page numbers
NO_BATCH = dict.fromkeys(BATCH_FIELDS, 0)


def magic(divisor: int) -> tuple[int, int]:
    """Returns (multiplier as a signed 32-bit integer, shift): n // divisor = (n * multiplier >> 32) >> shift for 0 <= n
    < 2^31.

    Granlund & Montgomery 1994 with 31-bit dividends. The device handles a divisor of 1.
    """
    if divisor == 1:
        return 0, 0
    power = 31 + (divisor - 1).bit_length()
    multiplier = -(-(1 << power) // divisor)
    return multiplier - (1 << 32) if multiplier >= 1 << 31 else multiplier, power - 32


def divisor(name: str, value: int) -> Fields:
    """Returns a divisor with the multiplier and shift that divide by it."""
    multiplier, shift = magic(value)
    return {name: value, f"{name}_multiplier": multiplier, f"{name}_shift": shift}


def mask_bounds(settings: Settings) -> Fields:
    """Returns the bounds of the visible keys relative to the end of the keys: row + bound + 1 must fit 32 bits. And
    whether tiles without hidden keys are processed apart: not where that would order a row's tiles by the rows that
    share them.
    """
    features, window_left = settings.features, settings.window_left
    if features.key_ranges:
        window_left = settings.range_windows[0]
    edges = window_left >= 0 or features.key_ranges
    return {
        "right": 0 if settings.causal or features.key_ranges else UNBOUNDED - 1,
        "left": -min(window_left, UNBOUNDED) if window_left >= 0 else -UNBOUNDED,
        "full_tiles": 0 if features.chunk_invariant and edges else -1,
    }


def scale_unit(scores: tuple[str, ...]) -> float:
    """Returns what the scale of a kernel includes: without score steps log2(e), for exp2 in place of exp."""
    return 1.0 if scores else LOG2E


def rope_fields(settings: Settings) -> Fields:
    """Returns the turns per position of pair 0, and the factor from a pair's to the next one's."""
    return {
        "rope_base": 1.0 / (2.0 * math.pi * settings.rope_scale),
        "rope_ratio": settings.rope_theta ** (-2.0 / settings.features.head_dim_qk),
    }


def kv_axes(settings: Settings) -> tuple[int, int]:
    """Returns the axes of tokens and of heads in k and v."""
    paged = int(settings.features.kv_source == "paged")
    return (1 + paged, paged) if settings.kv_layout == "HND" else (paged, 1 + paged)


def batch_fields(settings: Settings) -> tuple[str, ...]:
    """Returns the fields of a batch's numbers: under multi-item scoring the mask is in the records."""
    return (*BATCH_FIELDS, "mask") if settings.features.multi_item else BATCH_FIELDS
