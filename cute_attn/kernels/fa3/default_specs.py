"""Specs of the Hopper kernel that the compile gate builds."""

from __future__ import annotations

from typing import Any

from cute_attn.kernels.blocks.default_specs import GATHERED, HARDEST, ITEMS, LLAMA, SPLIT, shared_specs
from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, Launch, Operands, TileProblem
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.tiles import HEAD_DIMS, SIZED, rule_of
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.spec import KernelSpec


def default_specs() -> list[KernelSpec]:
    """Lists the specs to compile: those of both persistent families, and those that only Hopper's has."""
    specs = shared_specs(_spec, HEAD_DIMS)
    narrow = [(dims, source) for dims in ((64, 64), LLAMA) for source in ({}, ITEMS)]
    specs += [_spec(dims, mask="band", window_left=0, **source) for dims, source in narrow]
    shared: dict[str, Any] = {"mask": "band", "schedule": "items", "group": 8}
    specs += [_spec((64, 64), window_left=window_left, **shared) for window_left in (127, 1023)]
    specs.append(_spec(LLAMA, dtype=FP8_DTYPES[0], window_left=511, **shared))
    for (dims,), (launch, *_) in ((rule.when["head_dims"], rule.when["launch"]) for rule in SIZED):
        specs += [_spec(dims, launch=launch), _spec(dims, launch=launch, schedule="items")]
        specs.append(_spec(dims, launch=launch, **SPLIT))
    specs += [_spec(dims, out_dtype=FP8_DTYPES[0]) for dims in HEAD_DIMS]
    specs += [_spec(LLAMA, out_dtype=FP8_DTYPES[1], **ITEMS), _spec(LLAMA, out_dtype=FP8_DTYPES[0], **GATHERED)]
    specs += [_spec(dims, dtype=FP8_DTYPES[0], out_dtype=FP8_DTYPES[0], **ITEMS) for dims in FP8_HEAD_DIMS]
    specs.append(_spec(LLAMA, kv_dtype=FP8_DTYPES[0], out_dtype=FP8_DTYPES[0], **ITEMS))
    specs += [_spec(dims, kv_dtype=FP8_DTYPES[0], **HARDEST, **GATHERED) for dims in HEAD_DIMS]
    return [*specs, *_nvfp4_specs(), *_rope_specs()]


def _nvfp4_specs() -> list[KernelSpec]:
    packed = (dims for dims in HEAD_DIMS if dims[0] % 64 == 0)
    nvfp4: dict[str, Any] = {"kv_dtype": "nvfp4"}
    specs = [_spec(dims, **nvfp4, **source) for dims in packed for source in ({}, GATHERED)]
    specs += [_spec(dims, **nvfp4, **HARDEST, **GATHERED) for dims in (LLAMA, (256, 256))]
    return [*specs, _spec(LLAMA, **nvfp4, **SPLIT)]


def _rope_specs() -> list[KernelSpec]:
    rope: dict[str, Any] = {"pos_encoding": "rope"}
    specs = [_spec(dims, **rope, **source) for dims in HEAD_DIMS for source in ({}, ITEMS)]
    specs += [_spec(dims, **rope, **HARDEST, **ITEMS) for dims in (LLAMA, (256, 256))]
    return [*specs, _spec(LLAMA, **rope, **SPLIT)]


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
