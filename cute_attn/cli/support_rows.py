"""Rows of the support table: which problems are looked at, and in which row each one belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch

from cute_attn.kernels.mla.spec import CacheForm
from cute_attn.problem import Features, short
from cute_attn.request.settings import FP8, HALF
from cute_attn.runtime.arch import ARCHS, Arch

BF16, E4M3, NVFP4 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
CASES = (8, 16, 24, 40, 48, 64, 72, 80, 96, 112, 120, 128, 136, 192, 200, 256, 264)
EQUAL = (*range(8, 641, 8), 4, 12, 100, 129, 500)


class Sample(NamedTuple):
    """Features, and the architectures on which backends are asked about them."""

    features: Features
    archs: Sequence[str] = tuple(ARCHS)


@dataclass(frozen=True)
class Division:
    """A group before anybody was asked: `row_of` says in which row a sample belongs."""

    title: str
    samples: Callable[[Features], Iterator[Sample]]  # from a plain problem
    row_of: Callable[[Features, Arch], str]
    archs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # other than those of the samples, by backend
    decode: bool = True  # xqa is asked about decode problems only


def plain() -> Features:
    """A problem that every backend of a GPU takes."""
    return Features(torch.device("cuda"), BF16, BF16, BF16, 32, 8, 128, 128, kv_source="paged")


def _typed(features: Features, q: torch.dtype, kv: torch.dtype) -> Features:
    return features._replace(q_dtype=q, kv_dtype=kv, kv_block_scales=kv == NVFP4)


def _types(base: Features) -> Iterator[Sample]:
    sources = (*((half, half) for half in HALF), *((half, fp8) for half in HALF for fp8 in FP8), (BF16, NVFP4))
    for q, kv in (*sources, *((fp8, fp8) for fp8 in FP8)):
        yield Sample(_typed(base, q, kv))


def _row_of_types(f: Features, arch: Arch) -> str:
    if f.q_dtype in FP8:
        return "fp8 q, k and v, " + ("from" if arch.capability >= (12, 0) else "before") + " compute capability 12.0"
    if f.kv_block_scales:
        return "fp16 or bf16 q, NVFP4 k and v (`kv_cache_sf`)"
    return "fp16 or bf16 q, k and v" if f.kv_dtype in HALF else "fp16 or bf16 q, fp8 k and v"


def _dims(q: torch.dtype, kv: torch.dtype) -> Callable[[Features], Iterator[Sample]]:
    def samples(base: Features) -> Iterator[Sample]:
        pairs = {(dim, dim) for dim in EQUAL} | set(product(CASES, CASES))
        for qk, vo in sorted(pairs):
            yield Sample(_typed(base, q, kv)._replace(head_dim_qk=qk, head_dim_vo=vo))

    return samples


def _common(f: Features) -> tuple[int, bool]:
    """The larger head dimension, and whether both are equal."""
    return max(f.head_dim_qk, f.head_dim_vo), f.head_dim_qk == f.head_dim_vo


def _head_dims(f: Features) -> tuple[int, int]:
    return f.head_dim_qk, f.head_dim_vo


def _multiples(f: Features, n: int) -> bool:
    return f.head_dim_qk % n == 0 and f.head_dim_vo % n == 0


OTHERS = "all others"


def _row_of_half_dims(f: Features, arch: Arch) -> str:
    most, equal = _common(f)
    if _multiples(f, 8) and most <= 256:
        if equal and most >= 16:
            return "equal, multiples of 8 from 16 to 256"
        return "(8, 8), and unequal multiples of 8 up to 256"
    if equal and most == 512:
        return "(512, 512)"
    return "equal, multiples of 16 from 272 to 496" if equal and most < 512 and _multiples(f, 16) else OTHERS


def _row_of_fp8_kv_dims(f: Features, arch: Arch) -> str:
    most, equal = _common(f)
    if _multiples(f, 8) and most <= 256:
        if not _multiples(f, 16):
            return "multiples of 8 up to 256, at least one no multiple of 16"
        return "equal, multiples of 16 up to 256" if equal else "unequal multiples of 16 up to 256"
    if equal and most == 512:
        return "(512, 512)"
    return "equal, multiples of 32 from 288 to 480" if equal and most < 512 and _multiples(f, 32) else OTHERS


def _row_of_nvfp4_dims(f: Features, arch: Arch) -> str:
    most, equal = _common(f)
    if _multiples(f, 64) and most <= 256:
        if equal and most != 192:
            return "(64, 64), (128, 128) and (256, 256)"
        return "(192, 192), and unequal multiples of 64 up to 256"
    return "(512, 512)" if equal and most == 512 else OTHERS


def _row_of_fp8_dims(f: Features, arch: Arch) -> str:
    most, _ = _common(f)
    if _multiples(f, 8) and most <= 256:
        return "multiples of 16 up to 256, equal or not" if _multiples(f, 16) else "other multiples of 8 up to 256"
    return "(512, 512)" if _head_dims(f) == (512, 512) else OTHERS


def _outputs(base: Features) -> Iterator[Sample]:
    for out in (*HALF, torch.float32, *FP8):
        for dim in (64, 72, 128):
            yield Sample(base._replace(o_dtype=out, head_dim_qk=dim, head_dim_vo=dim))


def _row_of_outputs(f: Features, arch: Arch) -> str:
    if f.o_dtype in FP8:
        return "fp8, head dimensions " + ("that are multiples of 16" if _multiples(f, 16) else "that are not")
    return "fp16 or bf16" if f.o_dtype in HALF else "fp32"


def _device_outputs(base: Features) -> Iterator[Sample]:
    for out in (BF16, E4M3):
        yield Sample(base._replace(o_dtype=out, device_lengths=True, decode=True))


def _row_of_device_outputs(f: Features, arch: Arch) -> str:
    if f.o_dtype in HALF:
        return "output of fp16 or bf16"
    return "output of e4m3, " + ("from" if arch.capability >= (9, 0) else "before") + " compute capability 9.0"


def _rows(*rows: tuple[str, dict[str, Any]]) -> tuple[Callable[..., Any], Callable[[Features, Arch], str]]:
    """Samples and `row_of` of a group in which each row is one problem: its label, and what it changes."""
    labels: dict[Features, str] = {}

    def samples(base: Features) -> Iterator[Sample]:
        for label, changes in rows:
            features = base._replace(**changes)
            labels[features] = label
            yield Sample(features)

    return samples, lambda features, arch: labels[features]


def _phases(base: Features) -> Iterator[Sample]:
    yield Sample(base._replace(decode=False))
    yield Sample(base._replace(decode=True))


def _row_of_phases(f: Features, arch: Arch) -> str:
    return "decode: every request has as many query tokens, the newest" if f.decode else "prefill"


def _options(q: torch.dtype) -> tuple[Callable[..., Any], Callable[[Features, Arch], str]]:
    masks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("causal mask, sliding window, any lengths; no option of the rows below", {}),
        ("`logits_soft_cap`", {"soft_cap": True}),
        ("`pos_encoding_mode` ALIBI", {"pos_encoding_mode": "ALIBI"}),
        ("`pos_encoding_mode` ROPE_LLAMA, head dimension a multiple of 16", {"pos_encoding_mode": "ROPE_LLAMA"}),
        (
            "`pos_encoding_mode` ROPE_LLAMA, another head dimension",
            {"pos_encoding_mode": "ROPE_LLAMA", "head_dim_qk": 72, "head_dim_vo": 72},
        ),
        ("custom masks, boolean and packed", {"custom_mask": True}),
        ("multi-item scoring", {"multi_item": True}),
        ("causal mask with a range of keys per token", {"key_ranges": True}),
        ("attention sinks", {"sinks": True}),
        ("per-head scales (`scale_q`, `scale_k`, `scale_v`)", {"per_head_scales": True}),
    )
    typed = {} if q == BF16 else {"q_dtype": q, "kv_dtype": q}
    kept = [row for row in masks if not typed or "another" not in row[0]]
    return _rows(*((label, {**typed, **changes}) for label, changes in kept))


def _storage(base: Features) -> Iterator[Sample]:
    yield Sample(base)
    yield Sample(base._replace(kv_source="ragged"))
    yield Sample(base._replace(kv_source="dense", decode=False))


STORAGE = {"paged": "batches with paged k and v", "ragged": "batches with ragged k and v", "dense": "single requests"}
FP8_ARCHS = {"fa2": ("sm_120a", "sm_121a")}
_SPECIAL = _rows(
    ("`fixed_split_size`, `disable_split_kv`", {"own_splits": True}),
    ("expanded q, k or v (a stride of 0)", {"expanded": True}),
    ("paged k or v that span 64 GiB or more", {"large_cache": True}),
    (
        "fp8 or NVFP4 k and v whose rows start at multiples of 8 bytes, not all of 16",
        {"kv_dtype": E4M3, "half_aligned_kv": True},
    ),
)
_LOOSE = _rows(
    ("block scales of a token start at a multiple of their size, at most 16 bytes", {}),
    ("they do not", {"loose_scales": True}),
)
_DRAFTS = _rows(
    ("without a tree mask", {"decode": True, "device_lengths": True}),
    ("tree masks of draft tokens", {"decode": True, "device_lengths": True, "draft_mask": True}),
)


def _nvfp4(samples: Callable[..., Any]) -> Callable[[Features], Iterator[Sample]]:
    return lambda base: samples(_typed(base, BF16, NVFP4))


DIVISIONS = (
    Division("Prefill and decode", _phases, _row_of_phases, decode=False),
    Division("Types of q, k and v", _types, _row_of_types),
    Division("Head dimensions (qk, vo) of fp16 and bf16", _dims(BF16, BF16), _row_of_half_dims),
    Division("Head dimensions of fp8 k and v under q of 16 bits", _dims(BF16, E4M3), _row_of_fp8_kv_dims),
    Division("Head dimensions of NVFP4 k and v", _dims(BF16, NVFP4), _row_of_nvfp4_dims),
    Division(
        "Head dimensions of fp8 q, k and v (fa2: from compute capability 12.0)",
        _dims(E4M3, E4M3),
        _row_of_fp8_dims,
        FP8_ARCHS,
    ),
    Division("Output", _outputs, _row_of_outputs),
    Division("Options beside q of fp16 or bf16", *_options(BF16)),
    Division("Options beside fp8 q, k and v (fa2: from compute capability 12.0)", *_options(E4M3), FP8_ARCHS),
    Division("Where k and v are", _storage, lambda f, arch: STORAGE[f.kv_source]),
    Division("Memory and splits", *_SPECIAL),
    Division("Block scales of NVFP4 k and v", _nvfp4(_LOOSE[0]), _LOOSE[1]),
    Division("Lengths and page tables on the device, without a plan", _device_outputs, _row_of_device_outputs),
    Division("Draft tokens of calls without a plan", *_DRAFTS),
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
