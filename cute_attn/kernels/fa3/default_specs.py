"""Specs of the Hopper kernel that the compile gate builds."""

from __future__ import annotations

from typing import Any

from cute_attn.kernels.blocks.persistent_spec import GATHERED, ITEMS, MODIFIED
from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, Launch, Operands, TileProblem
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.fa3.tiles import HEAD_DIMS, SIZED, rule_of
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.spec import KernelSpec


def default_specs() -> list[KernelSpec]:
    """Lists the specs to compile: all head dims in bf16, dense, paged and with the most demanding scores; the rest at
    the commonest dims.
    """
    llama = (128, 128)
    specs = [_spec(dims, **source) for dims in HEAD_DIMS for source in ({}, ITEMS, GATHERED)]
    specs += [_spec(dims, split=True, out_dtype="float32") for dims in HEAD_DIMS]
    specs.append(_spec(llama, out_dtype="float32"))  # of a step of ring prefill
    specs += [_spec(dims, **MODIFIED[0], **(ITEMS if dims == llama else {})) for dims in HEAD_DIMS]
    specs += [_spec(dims, **MODIFIED[0], **GATHERED) for dims in HEAD_DIMS]
    specs += [_spec(llama, **modified) for modified in MODIFIED[1:]]
    specs += [_spec(llama, mask="multi_item", **source) for source in (ITEMS, GATHERED)]
    narrow = [(dims, source) for dims in ((64, 64), llama) for source in ({}, ITEMS)]
    specs += [_spec(dims, mask="band", window_left=0, **source) for dims, source in narrow]
    shared: dict[str, Any] = {"mask": "band", "schedule": "items", "group": 8}
    specs += [_spec((64, 64), window_left=window_left, **shared) for window_left in (127, 1023)]
    specs.append(_spec(llama, dtype=FP8_DTYPES[0], window_left=511, **shared))
    for (dims,), (launch, *_) in ((rule.when["head_dims"], rule.when["launch"]) for rule in SIZED):
        specs += [_spec(dims, launch=launch), _spec(dims, launch=launch, schedule="items")]
        specs.append(_spec(dims, launch=launch, split=True, out_dtype="float32"))
    specs += [_spec(llama, schedule="items"), _spec(llama, dtype="float16", out_dtype="float16")]
    fp8: tuple[dict[str, Any], ...] = ({}, ITEMS, {"schedule": "items"}, {"mask": "band"}, {**MODIFIED[0], **ITEMS})
    for dims in FP8_HEAD_DIMS:
        specs += [_spec(dims, dtype="float8_e4m3fn", **source) for source in fp8]
        specs.append(_spec(dims, dtype="float8_e4m3fn", split=True, out_dtype="float32"))
    specs += [_spec(dims, out_dtype=FP8_DTYPES[0]) for dims in HEAD_DIMS]
    specs += [_spec(llama, out_dtype=FP8_DTYPES[1], **ITEMS), _spec(llama, out_dtype=FP8_DTYPES[0], **GATHERED)]
    specs += [_spec(dims, dtype=FP8_DTYPES[0], out_dtype=FP8_DTYPES[0], **ITEMS) for dims in FP8_HEAD_DIMS]
    specs.append(_spec(llama, kv_dtype=FP8_DTYPES[0], out_dtype=FP8_DTYPES[0], **ITEMS))
    return [*specs, *_fp8_kv_specs(), *_nvfp4_specs(), *_rope_specs()]


def _fp8_kv_specs() -> list[KernelSpec]:
    llama, (e4m3, e5m2) = (128, 128), FP8_DTYPES
    specs = [_spec(dims, kv_dtype=e4m3, **source) for dims in HEAD_DIMS for source in ({}, ITEMS, GATHERED)]
    specs += [_spec(dims, kv_dtype=e4m3, **MODIFIED[0], **source) for dims in HEAD_DIMS for source in (ITEMS, GATHERED)]
    specs += [_spec(llama, kv_dtype=e4m3, split=True, out_dtype="float32"), _spec(llama, kv_dtype=e5m2, **ITEMS)]
    specs += [_spec(llama, dtype="float16", out_dtype="float16", kv_dtype=stored) for stored in (e4m3, e5m2)]
    return specs


def _nvfp4_specs() -> list[KernelSpec]:
    llama, packed = (128, 128), (dims for dims in HEAD_DIMS if dims[0] % 64 == 0)
    nvfp4: dict[str, Any] = {"kv_dtype": "nvfp4"}
    specs = [_spec(dims, **nvfp4, **source) for dims in packed for source in ({}, GATHERED)]
    specs += [_spec(dims, **nvfp4, **MODIFIED[0], **GATHERED) for dims in (llama, (256, 256))]
    specs += [_spec(llama, **nvfp4, split=True, out_dtype="float32")]
    return specs


def _rope_specs() -> list[KernelSpec]:
    rope: dict[str, Any] = {"pos_encoding": "rope"}
    specs = [_spec(dims, **rope, **source) for dims in HEAD_DIMS for source in ({}, ITEMS)]
    specs += [_spec(dims, **rope, **MODIFIED[0], **ITEMS) for dims in ((128, 128), (256, 256))]
    specs += [_spec((128, 128), **rope, split=True, out_dtype="float32")]
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
