"""Specs of the mma.sync kernel that the compile gate builds."""

from __future__ import annotations

from itertools import product
from typing import Any

from cute_attn.kernels.blocks.default_specs import HARDEST, ITEMS, LLAMA, SPLIT, Fields
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.fa2.tiles import APPEND_ROWS, DECODE_ROWS, HEAD_DIMS, WIDE_HEAD_DIMS, Variant, choose
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

FP8_FROM = (12, 0)  # compute capability from which q may be fp8
ROWS = DECODE, APPEND, PREFILL = DECODE_ROWS, APPEND_ROWS, 1 << 20  # packed rows of a request
NARROW, BROAD, WIDE = (64, 64), (256, 256), WIDE_HEAD_DIMS
E4M3, E5M2 = FP8_DTYPES

Listed = list[tuple[tuple[tuple[int, int], ...], tuple[int, ...], Fields]]  # head dims, rows, and fields of all of them
ROTATED: Fields = {"mask": "packed", "scores": ("scale", "soft_cap"), "pos_encoding": "rope"}
VARIANTS: tuple[Fields, ...] = (
    {"mask": "packed"},
    {"scores": ("scale",)},
    {"scores": ("scale", "soft_cap")},
    {"scores": ("scale", "alibi")},
    {"pos_encoding": "rope"},
)


def default_specs(arch: Arch) -> list[KernelSpec]:
    """Lists all head dims in bf16, the commonest in fp16, every variant, and batches."""
    batches = [(dims, rows, ITEMS | fields) for dims, rows, fields in BATCHES]
    listed = [*_single(), *batches, *(FP8 if arch.capability >= FP8_FROM else [])]
    return [_spec(arch, *key, **fields) for dims, rows, fields in listed for key in product(dims, rows)]


def _single() -> Listed:
    listed: Listed = [((WIDE,), (PREFILL,), {}), ((WIDE,), (DECODE,), SPLIT)]
    listed.append(((LLAMA,), (DECODE,), {"kv_dtype": E4M3, **SPLIT}))
    for split in ({}, SPLIT):
        listed += [(HEAD_DIMS, ROWS, split), ((NARROW, LLAMA), ROWS, {"dtype": "float16", **split})]
        rows = DECODE if split else PREFILL
        listed += [(HEAD_DIMS, (rows,), variant | split) for variant in (HARDEST, ROTATED)]
        listed += [((LLAMA,), (rows,), variant | split) for variant in VARIANTS]
    return listed


BATCHES: Listed = [
    ((*HEAD_DIMS, WIDE), (DECODE, PREFILL), {}),
    ((LLAMA,), (APPEND,), {}),
    ((LLAMA,), (PREFILL,), {"dtype": "float16"}),
    ((LLAMA, WIDE), (DECODE, PREFILL), ROTATED),
    *(((LLAMA,), (PREFILL,), {"mask": mask, "scores": HARDEST["scores"]}) for mask in ("multi_item", "ranges")),
    ((LLAMA, BROAD), (PREFILL,), {"mask": "ranges"}),
    ((LLAMA,), ROWS, {"kv": "dense"}),
    ((NARROW,), (PREFILL,), {"kv": "dense"}),
    ((LLAMA,), (PREFILL,), {"kv": "dense", **HARDEST}),
    *(((NARROW, LLAMA, BROAD), (DECODE,), {"kv_dtype": stored}) for stored in (E4M3, "nvfp4")),
    *(((LLAMA,), (PREFILL,), {"kv_dtype": stored}) for stored in (E4M3, "nvfp4")),
    ((WIDE,), (DECODE, PREFILL), {"kv_dtype": E4M3}),
    ((LLAMA,), (DECODE,), {"kv_dtype": E5M2}),
    ((LLAMA,), (DECODE,), {"kv_dtype": E4M3, "dtype": "float16"}),
    ((LLAMA,), (PREFILL,), {"kv_dtype": E4M3, **ROTATED}),
    ((LLAMA,), (DECODE,), {"kv_dtype": E4M3, "kv_copy_bytes": 8}),
    (((72, 72),), (PREFILL,), {"kv_dtype": E4M3, "kv_copy_bytes": 8}),
]
# fp8 q, k and v: every tile of all head dims, plain and most demanding; all else at 128.
FP8: Listed = [
    *((HEAD_DIMS, ROWS, {"dtype": E4M3, **fields}) for fields in ({}, ITEMS | HARDEST)),
    (HEAD_DIMS, (DECODE,), {"dtype": E4M3, **SPLIT}),
    ((LLAMA,), ROWS, {"dtype": E4M3, **ITEMS}),
    ((LLAMA,), ROWS, {"dtype": E4M3, "mask": "multi_item", "scores": HARDEST["scores"], **ITEMS}),
    ((LLAMA,), ROWS, {"dtype": E4M3, "scores": ("scale",)}),
    ((NARROW,), (DECODE,), {"dtype": E5M2, "out_dtype": "float16"}),
    ((NARROW,), (DECODE,), {"dtype": E4M3, "kv_copy_bytes": 8}),
]


def _spec(
    arch: Arch, dims: tuple[int, int], rows: int, *, dtype: str = "bfloat16", out_dtype: str = "", **fields: Any
) -> KernelSpec:
    plain, fp8 = not {"mask", "scores", "pos_encoding"} & fields.keys(), dtype in FP8_DTYPES
    variant = Variant(dims, plain, "schedule" in fields, fields.get("kv_dtype", ""), fp8)
    out_dtype = out_dtype or ("bfloat16" if fp8 else dtype)
    return Fa2Spec(dtype, out_dtype, *dims, tile=choose(variant, rows, arch), **fields)
