"""Specs that the compile gate builds of both families of persistent kernels, and fields that it asks of fa2 too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.spec import KernelSpec

Fields = dict[str, Any]
LLAMA = (128, 128)
HARDEST: Fields = {"mask": "packed", "scores": ("scale", "alibi", "soft_cap")}  # needs the most registers
MODIFIED: tuple[Fields, ...] = ({"mask": "packed"}, {"mask": "band"}, {"scores": ("scale", "soft_cap")})
ITEMS: Fields = {"schedule": "items", "kv": "paged"}
GATHERED: Fields = {"schedule": "items", "kv": "gathered"}
SPLIT: Fields = {"split": True, "out_dtype": "float32"}


def shared_specs(spec: Callable[..., KernelSpec], head_dims: Sequence[tuple[int, int]]) -> list[KernelSpec]:
    """Lists all head dims in bf16, dense, paged and with the most demanding scores, and the rest at the commonest dims.
    `spec`: makes one of head dims and fields.
    """
    (e4m3, e5m2), half = FP8_DTYPES, {"dtype": "float16", "out_dtype": "float16"}
    of_all: list[Fields] = [{}, ITEMS, GATHERED, SPLIT, HARDEST | GATHERED]
    of_all += [{"kv_dtype": e4m3, **each} for each in ({}, ITEMS, GATHERED, HARDEST | ITEMS)]
    specs = [spec(dims, **each) for dims, each in product(head_dims, of_all)]
    specs += [spec(dims, **HARDEST) for dims in head_dims if dims != LLAMA]
    of_llama: list[Fields] = [*MODIFIED, HARDEST | ITEMS, *({"mask": "multi_item", **kv} for kv in (ITEMS, GATHERED))]
    of_llama += [{"schedule": "items"}, half, {"out_dtype": "float32"}]  # the last of a step of ring prefill
    of_llama += [{"kv_dtype": e4m3, **SPLIT}, {"kv_dtype": e5m2, **ITEMS}]
    of_llama += [{"kv_dtype": stored, **half} for stored in (e4m3, e5m2)]
    specs += [spec(LLAMA, **each) for each in of_llama]
    of_fp8: list[Fields] = [{}, ITEMS, {"schedule": "items"}, {"mask": "band"}, HARDEST | ITEMS, SPLIT]
    return specs + [spec(dims, dtype=e4m3, **each) for dims, each in product(FP8_HEAD_DIMS, of_fp8)]
