"""Specs of the mma.sync kernel that the compile gate builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.fa2.tiles import (
    APPEND_ROWS,
    DECODE_ROWS,
    HEAD_DIMS,
    WIDE_HEAD_DIMS,
    Variant,
    candidates,
    choose,
)
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

FP8_FROM = (12, 0)  # compute capability from which q may be fp8
PREFILL, APPEND, DECODE = 1 << 20, APPEND_ROWS, DECODE_ROWS  # packed rows of a request

VARIANTS: tuple[dict[str, Any], ...] = (
    {"mask": "packed"},
    {"scores": ("scale",)},
    {"scores": ("scale", "soft_cap")},
    {"scores": ("scale", "alibi")},
    {"pos_encoding": "rope"},
    {"mask": "packed", "scores": ("scale", "alibi", "soft_cap")},
    {"mask": "packed", "scores": ("scale", "soft_cap"), "pos_encoding": "rope"},
)


def default_specs(arch: Arch) -> list[KernelSpec]:
    """Lists all head dims in bf16, the commonest in fp16, every variant, and batches."""
    specs: list[KernelSpec] = []
    for head_dims in HEAD_DIMS:
        specs += _plain(head_dims, "bfloat16", arch)
        specs += _variants(head_dims, VARIANTS if head_dims == (128, 128) else VARIANTS[-2:], arch)
    for head_dims in ((64, 64), (128, 128)):
        specs += _plain(head_dims, "float16", arch)
    return specs + _batches(arch) + _wide(arch) + (_fp8(arch) if arch.capability >= FP8_FROM else [])


def _fp8(arch: Arch) -> list[KernelSpec]:
    """Lists fp8 q, k and v: every tile of all head dims, plain and most demanding; all else at 128."""
    specs, hardest = list[Fa2Spec](), VARIANTS[-2]
    for head_dims, rows in product(HEAD_DIMS, (DECODE, APPEND, PREFILL)):
        tile = choose(Variant(head_dims, fp8=True), rows, arch)
        one = Fa2Spec("float8_e4m3fn", "bfloat16", *head_dims, tile=tile)
        batch = replace(one, schedule="items", kv="paged")
        specs += [one, replace(batch, **hardest)]
        if rows == DECODE:
            specs += [replace(one, out_dtype="float32", split=True)]
        if head_dims == (128, 128):
            specs += [
                batch,
                replace(batch, mask="multi_item", scores=hardest["scores"]),
                replace(one, scores=("scale",)),
            ]
    return [*specs, replace(specs[0], dtype="float8_e5m2", out_dtype="float16"), replace(specs[0], kv_copy_bytes=8)]


def _wide(arch: Arch) -> list[KernelSpec]:
    """Lists head dimension 512: prefill, decode, the most demanding scores, pages of both formats."""
    wide, e4m3 = Variant(WIDE_HEAD_DIMS), "float8_e4m3fn"
    prefill, decode = (choose(wide, rows, arch) for rows in (PREFILL, DECODE))
    return [
        Fa2Spec("bfloat16", "bfloat16", *WIDE_HEAD_DIMS, tile=prefill),
        Fa2Spec("bfloat16", "float32", *WIDE_HEAD_DIMS, tile=decode, split=True),
        *(_batch(arch, WIDE_HEAD_DIMS, rows, kv_dtype=kv) for rows in (DECODE, PREFILL) for kv in ("", e4m3)),
        *(_batch(arch, WIDE_HEAD_DIMS, rows, **VARIANTS[-1]) for rows in (DECODE, PREFILL)),
    ]


def _plain(head_dims: tuple[int, int], dtype: str, arch: Arch) -> list[KernelSpec]:
    return [
        Fa2Spec(dtype, "float32" if split else dtype, *head_dims, split=split, tile=tile)
        for tile in candidates(Variant(head_dims), arch)
        for split in (False, True)
    ]


def _variants(head_dims: tuple[int, int], variants: Sequence[dict], arch: Arch) -> list[KernelSpec]:
    modified = Variant(head_dims, plain=False)
    return [
        Fa2Spec("bfloat16", "float32" if split else "bfloat16", *head_dims, split=split, tile=tile, **variant)
        for variant in variants
        for split, tile in ((False, choose(modified, 1 << 20, arch)), (True, choose(modified, 1, arch)))
    ]


def _batches(arch: Arch) -> list[KernelSpec]:
    llama = (128, 128)
    modified, masked = VARIANTS[-1], VARIANTS[-2]
    specs = [_batch(arch, head_dims, rows) for head_dims in HEAD_DIMS for rows in (DECODE, PREFILL)]
    specs += [_batch(arch, llama, APPEND)]
    specs += [_batch(arch, llama, rows, kv="dense") for rows in (DECODE, APPEND, PREFILL)]
    specs += [_batch(arch, (64, 64), PREFILL, kv="dense"), _batch(arch, llama, PREFILL, dtype="float16")]
    specs += [_batch(arch, llama, rows, **modified) for rows in (DECODE, PREFILL)]
    specs += [_batch(arch, llama, PREFILL, kv="dense", **masked)]
    specs += [_batch(arch, llama, PREFILL, mask=mask, scores=masked["scores"]) for mask in ("multi_item", "ranges")]
    specs += [_batch(arch, head_dims, PREFILL, mask="ranges") for head_dims in (llama, (256, 256))]
    for kv_dtype in ("float8_e4m3fn", "nvfp4"):
        specs += [_batch(arch, head_dims, DECODE, kv_dtype=kv_dtype) for head_dims in ((64, 64), llama, (256, 256))]
        specs += [_batch(arch, llama, PREFILL, kv_dtype=kv_dtype)]
    specs += [_batch(arch, llama, DECODE, kv_dtype="float8_e5m2")]
    specs += [_batch(arch, llama, DECODE, kv_dtype="float8_e4m3fn", dtype="float16")]
    specs += [_batch(arch, llama, PREFILL, kv_dtype="float8_e4m3fn", **modified)]
    specs += [
        _batch(arch, head_dims, rows, kv_dtype="float8_e4m3fn", kv_copy_bytes=8)
        for head_dims, rows in ((llama, DECODE), ((72, 72), PREFILL))
    ]
    one = choose(Variant(llama, kv_dtype="float8_e4m3fn"), DECODE, arch)
    return [*specs, Fa2Spec("bfloat16", "float32", *llama, split=True, kv_dtype="float8_e4m3fn", tile=one)]


def _batch(
    arch: Arch,
    head_dims: tuple[int, int],
    rows: int,
    *,
    kv: str = "paged",
    dtype: str = "bfloat16",
    kv_dtype: str = "",
    kv_copy_bytes: int = 16,
    **changes: Any,
) -> KernelSpec:
    tile = choose(Variant(head_dims, not changes, True, kv_dtype), rows, arch)
    fields: dict[str, Any] = {"schedule": "items", "kv": kv, "kv_dtype": kv_dtype, "kv_copy_bytes": kv_copy_bytes}
    fields |= {"tile": tile, **changes}
    return Fa2Spec(dtype, dtype, *head_dims, **fields)
