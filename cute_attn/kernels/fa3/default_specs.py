"""Specs of the Hopper kernel that the compile gate builds."""

from __future__ import annotations

from itertools import product
from typing import Any

from cute_attn.kernels.blocks.default_specs import GATHERED, HARDEST, ITEMS, LLAMA, SPLIT, Fields, shared_specs
from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, Launch, Operands, TileProblem
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.tiles import HEAD_DIMS, SIZED, rule_of
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.spec import KernelSpec

ROPE: Fields = {"pos_encoding": "rope"}
NVFP4: Fields = {"kv_dtype": "nvfp4"}


def default_specs() -> list[KernelSpec]:
    """Lists the specs to compile: those of both persistent families, and those that only Hopper's has."""
    e4m3, e5m2 = FP8_DTYPES
    of_all: list[Fields] = [{"out_dtype": e4m3}, {"kv_dtype": e4m3, **HARDEST, **GATHERED}, ROPE, ROPE | ITEMS]
    specs = shared_specs(_spec, HEAD_DIMS) + [_spec(dims, **each) for dims, each in product(HEAD_DIMS, of_all)]
    packed = (dims for dims in HEAD_DIMS if dims[0] % 64 == 0)
    specs += [_spec(dims, **NVFP4, **source) for dims in packed for source in ({}, GATHERED)]
    hardest = ROPE | HARDEST | ITEMS, NVFP4 | HARDEST | GATHERED
    specs += [_spec(dims, **each) for dims, each in product((LLAMA, (256, 256)), hardest)]
    of_llama = [ROPE | SPLIT, NVFP4 | SPLIT, {"kv_dtype": e4m3, "out_dtype": e4m3, **ITEMS}]
    of_llama += [{"out_dtype": e5m2, **ITEMS}, {"out_dtype": e4m3, **GATHERED}]
    specs += [_spec(LLAMA, **each) for each in of_llama]
    specs += [_spec(dims, dtype=e4m3, out_dtype=e4m3, **ITEMS) for dims in FP8_HEAD_DIMS]
    narrow: Fields = {"mask": "band", "window_left": 0}
    specs += [_spec(dims, **narrow, **source) for dims, source in product(((64, 64), LLAMA), ({}, ITEMS))]
    shared: Fields = {"mask": "band", "schedule": "items", "group": 8}
    specs += [_spec((64, 64), window_left=window_left, **shared) for window_left in (127, 1023)]
    specs.append(_spec(LLAMA, dtype=e4m3, window_left=511, **shared))
    for (dims,), (launch, *_) in ((rule.when["head_dims"], rule.when["launch"]) for rule in SIZED):
        specs += [_spec(dims, launch=launch, **each) for each in ({}, {"schedule": "items"}, SPLIT)]
    return specs


def _spec(
    dims: tuple[int, int],
    *,
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    window_left: int = -1,
    launch: Launch = "",
    group: int = 1,
    **rest: Any,
) -> KernelSpec:
    plain = rest.get("mask", "stop") == "stop" and not rest.get("scores")
    rotated, fp8 = rest.get("pos_encoding") == "rope", dtype in FP8_DTYPES
    operands: Operands = "rope" if rotated else "fp8" if fp8 else "fp8_kv" if "kv_dtype" in rest else ""
    problem = TileProblem(
        dims,
        rest.get("kv", "dense"),
        operands,
        plain=plain,
        window_left=window_left,
        group=group,
        launch=launch,
    )
    return Fa3Spec(dtype, out_dtype, *dims, tile=rule_of(problem).value, **rest)
