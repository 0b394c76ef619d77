"""Rows of the support table: which problems are looked at, and in which row each one belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch

from cute_attn.kernels.mla.spec import CacheForm
from cute_attn.problem import Features, short
from cute_attn.request.settings import FP8, HALF
from cute_attn.runtime.arch import ARCHS

BF16, E4M3, NVFP4 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
UNEQUAL = (8, 16, 24, 40, 48, 64, 72, 80, 96, 112, 120, 128, 136, 192, 200, 256, 264)
EQUAL = (*range(8, 641, 8), 4, 12, 100, 129, 500)
OTHERS = "all others"
# A problem that every backend of a GPU takes.
PLAIN = Features(torch.device("cuda"), BF16, BF16, BF16, 32, 8, 128, 128, kv_source="paged")


class Sample(NamedTuple):
    """A problem, its row, and the architectures on which backends are asked about it."""

    row: str
    features: Features
    archs: Sequence[str] = tuple(ARCHS)


@dataclass(frozen=True)
class Division:
    """A group before anybody was asked."""

    title: str
    samples: Sequence[Sample]
    archs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # other than those of the samples, by backend
    decode: bool = True  # xqa is asked about decode problems only


def _rows(base: Features, *rows: tuple[str, dict[str, Any]]) -> list[Sample]:
    """Problems by their row, and what they change."""
    return [Sample(row, base._replace(**changes)) for row, changes in rows]


def _by_capability(row: str, features: Features, since: int) -> list[Sample]:
    """A row for the architectures before major compute capability `since`, and one from it on."""
    before = [name for name, arch in ARCHS.items() if arch.capability < (since, 0)]
    later = [name for name in ARCHS if name not in before]
    parts = ("before", before), ("from", later)
    return [Sample(f"{row}, {word} compute capability {since}.0", features, archs) for word, archs in parts]


def _typed(q: torch.dtype, kv: torch.dtype) -> Features:
    return PLAIN._replace(q_dtype=q, kv_dtype=kv, kv_block_scales=kv == NVFP4)


TYPES = [
    *(Sample("fp16 or bf16 q, k and v", _typed(half, half)) for half in HALF),
    *(Sample("fp16 or bf16 q, fp8 k and v", _typed(half, fp8)) for half in HALF for fp8 in FP8),
    Sample("fp16 or bf16 q, NVFP4 k and v (`kv_cache_sf`)", _typed(BF16, NVFP4)),
    *(sample for fp8 in FP8 for sample in _by_capability("fp8 q, k and v", _typed(fp8, fp8), 12)),
]


class Dims(NamedTuple):
    """A row of head dimensions: multiples of `step` up to `most`, of which earlier rows have none."""

    row: str
    step: int
    most: int = 256
    equal: bool = False  # qk and vo

    def has(self, qk: int, vo: int) -> bool:
        """Tell whether a pair belongs in the row."""
        return qk % self.step == vo % self.step == 0 and max(qk, vo) <= self.most and (qk == vo or not self.equal)


LARGEST = Dims("(512, 512)", 512, 512)
OTHER_HALF = "(8, 8), and unequal multiples of 8 up to 256"
HALF_DIMS = (
    Dims(OTHER_HALF, 8, 8),
    Dims("equal, multiples of 8 from 16 to 256", 8, equal=True),
    Dims(OTHER_HALF, 8),
    Dims("equal, multiples of 16 from 272 to 496", 16, 496, equal=True),
    LARGEST,
)
FP8_KV_DIMS = (
    Dims("equal, multiples of 16 up to 256", 16, equal=True),
    Dims("unequal multiples of 16 up to 256", 16),
    Dims("multiples of 8 up to 256, at least one no multiple of 16", 8),
    Dims("equal, multiples of 32 from 288 to 480", 32, 480, equal=True),
    LARGEST,
)
OTHER_NVFP4 = "(192, 192), and unequal multiples of 64 up to 256"
NVFP4_DIMS = (
    Dims(OTHER_NVFP4, 192),
    Dims("(64, 64), (128, 128) and (256, 256)", 64, equal=True),
    Dims(OTHER_NVFP4, 64),
    LARGEST,
)
FP8_DIMS = (Dims("multiples of 16 up to 256, equal or not", 16), Dims("other multiples of 8 up to 256", 8), LARGEST)


def _dims(q: torch.dtype, kv: torch.dtype, rows: Sequence[Dims]) -> list[Sample]:
    pairs = sorted({(dim, dim) for dim in EQUAL} | set(product(UNEQUAL, UNEQUAL)))
    labels = [next((each.row for each in rows if each.has(*pair)), OTHERS) for pair in pairs]
    typed = _typed(q, kv)
    return [
        Sample(label, typed._replace(head_dim_qk=qk, head_dim_vo=vo))
        for label, (qk, vo) in zip(labels, pairs, strict=True)
    ]


def _output(dtype: torch.dtype, dim: int) -> Sample:
    row = "fp16 or bf16" if dtype in HALF else "fp32"
    if dtype in FP8:
        row = "fp8, head dimensions " + ("that are not" if dim % 16 else "that are multiples of 16")
    return Sample(row, PLAIN._replace(o_dtype=dtype, head_dim_qk=dim, head_dim_vo=dim))


def _options(q: torch.dtype) -> list[Sample]:
    rope = {"pos_encoding_mode": "ROPE_LLAMA"}
    another = ("`pos_encoding_mode` ROPE_LLAMA, another head dimension", {**rope, "head_dim_qk": 72, "head_dim_vo": 72})
    return _rows(
        _typed(q, q),
        ("causal mask, sliding window, any lengths; no option of the rows below", {}),
        ("`logits_soft_cap`", {"soft_cap": True}),
        ("`pos_encoding_mode` ALIBI", {"pos_encoding_mode": "ALIBI"}),
        ("`pos_encoding_mode` ROPE_LLAMA, head dimension a multiple of 16", rope),
        *([another] if q == BF16 else []),
        ("custom masks, boolean and packed", {"custom_mask": True}),
        ("multi-item scoring", {"multi_item": True}),
        ("causal mask with a range of keys per token", {"key_ranges": True}),
        ("attention sinks", {"sinks": True}),
        ("per-head scales (`scale_q`, `scale_k`, `scale_v`)", {"per_head_scales": True}),
    )


DEVICE_LENGTHS = PLAIN._replace(decode=True, device_lengths=True)
FP8_ARCHS = {"fa2": ("sm_120a", "sm_121a")}
DIVISIONS = (
    Division(
        "Prefill and decode",
        _rows(
            PLAIN,
            ("prefill", {}),
            ("decode: few query tokens per request, the newest", {"decode": True}),
        ),
        decode=False,
    ),
    Division("Types of q, k and v", TYPES),
    Division("Head dimensions (qk, vo) of fp16 and bf16", _dims(BF16, BF16, HALF_DIMS)),
    Division("Head dimensions of fp8 k and v under q of 16 bits", _dims(BF16, E4M3, FP8_KV_DIMS)),
    Division("Head dimensions of NVFP4 k and v", _dims(BF16, NVFP4, NVFP4_DIMS)),
    Division(
        "Head dimensions of fp8 q, k and v (fa2: from compute capability 12.0)",
        _dims(E4M3, E4M3, FP8_DIMS),
        FP8_ARCHS,
    ),
    Division("Output", [_output(dtype, dim) for dtype in (*HALF, torch.float32, *FP8) for dim in (64, 72, 128)]),
    Division("Options beside q of fp16 or bf16", _options(BF16)),
    Division("Options beside fp8 q, k and v (fa2: from compute capability 12.0)", _options(E4M3), FP8_ARCHS),
    Division(
        "Where k and v are",
        _rows(
            PLAIN,
            ("batches with paged k and v", {}),
            ("batches with ragged k and v", {"kv_source": "ragged"}),
            ("single requests", {"kv_source": "dense"}),
        ),
    ),
    Division(
        "Memory and splits",
        _rows(
            PLAIN,
            ("`fixed_split_size`, `disable_split_kv`", {"own_splits": True}),
            ("expanded q, k or v (a stride of 0)", {"expanded": True}),
            ("paged k or v that span 64 GiB or more", {"large_cache": True}),
            (
                "fp8 or NVFP4 k and v whose rows start at multiples of 8 bytes, not all of 16",
                {"kv_dtype": E4M3, "half_aligned_kv": True},
            ),
        ),
    ),
    Division(
        "Block scales of NVFP4 k and v",
        _rows(
            _typed(BF16, NVFP4),
            ("block scales of a token start at a multiple of their size, at most 16 bytes", {}),
            ("they do not", {"loose_scales": True}),
        ),
    ),
    Division(
        "Lengths and page tables on the device, without a plan",
        [
            Sample("output of fp16 or bf16", DEVICE_LENGTHS),
            *_by_capability("output of e4m3", DEVICE_LENGTHS._replace(o_dtype=E4M3), 9),
        ],
    ),
    Division(
        "Draft tokens of calls without a plan",
        _rows(DEVICE_LENGTHS, ("without a tree mask", {}), ("tree masks of draft tokens", {"draft_mask": True})),
    ),
)

_E4M3_NAME = short(E4M3)
LATENT_FORMS = {
    "512 latent and 64 rotated columns of 16 bits": CacheForm(),
    "512 latent columns of 16 bits": CacheForm(rope_bits=0),
    "e4m3, a scale for each part": CacheForm(_E4M3_NAME, 8),
    "e4m3 without rotated columns": CacheForm(_E4M3_NAME, 0),
    "e4m3, scales of groups of 128 latent columns": CacheForm(_E4M3_NAME, 8, grouped=True),
    "the same without rotated columns": CacheForm(_E4M3_NAME, 0, grouped=True),
    "656 bytes: scales of groups, 16-bit rotated columns": CacheForm(_E4M3_NAME, 16, grouped=True),
}
