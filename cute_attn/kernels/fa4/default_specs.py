"""Specs of the Blackwell kernel that the compile gate builds."""

from __future__ import annotations

from typing import Any

from cute_attn.kernels.blocks.persistent_spec import GATHERED, ITEMS, MODIFIED
from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, HEAD_DIMS, Operands, TileProblem
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.tiles import rule_of
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec


def default_specs(gpu: Arch) -> list[KernelSpec]:
    """Lists the specs to compile: all head dims in bf16, dense, paged and with the most demanding scores; the rest at
    the commonest dims.
    """
    arch = gpu.name
    llama = (128, 128)
    specs = [_spec(arch, dims, **source) for dims in HEAD_DIMS for source in ({}, ITEMS, GATHERED)]
    specs += [_spec(arch, dims, split=True, out_dtype="float32") for dims in HEAD_DIMS]
    specs.append(_spec(arch, llama, out_dtype="float32"))  # of a step of ring prefill
    specs += [_spec(arch, dims, **MODIFIED[0], **source) for dims in HEAD_DIMS for source in ({}, GATHERED)]
    specs += [_spec(arch, llama, **modified) for modified in MODIFIED[1:]]
    specs += [_spec(arch, llama, **MODIFIED[0], **ITEMS), _spec(arch, (192, 128), mask="band", **ITEMS)]
    specs += [_spec(arch, dims, full=True, **source) for dims in ((192, 128), llama) for source in ({}, ITEMS)]
    modified_in_pairs: tuple[dict[str, Any], ...] = (
        {"scores": MODIFIED[0]["scores"]},
        {"scores": MODIFIED[0]["scores"], **ITEMS},
        {"schedule": "items"},
        {"split": True, "out_dtype": "float32"},
    )
    specs += [_spec(arch, llama, full=True, **rest) for rest in modified_in_pairs]
    specs += [_spec(arch, llama, mask="multi_item", **source) for source in (ITEMS, GATHERED)]
    specs += [_spec(arch, llama, schedule="items"), _spec(arch, llama, dtype="float16", out_dtype="float16")]
    fp8: tuple[dict[str, Any], ...] = ({}, ITEMS, GATHERED, {"schedule": "items"}, {"mask": "band"})
    fp8 += ({**MODIFIED[0], **ITEMS},)
    for dims in FP8_HEAD_DIMS:
        specs += [_spec(arch, dims, dtype="float8_e4m3fn", **source) for source in fp8]
        specs.append(_spec(arch, dims, dtype="float8_e4m3fn", split=True, out_dtype="float32"))
    return specs + _fp8_kv_specs(arch)


def _fp8_kv_specs(arch: str) -> list[KernelSpec]:
    llama, (e4m3, e5m2) = (128, 128), FP8_DTYPES
    specs = [_spec(arch, dims, kv_dtype=e4m3, **source) for dims in HEAD_DIMS for source in ({}, ITEMS, GATHERED)]
    specs += [_spec(arch, dims, kv_dtype=e4m3, **MODIFIED[0], **ITEMS) for dims in HEAD_DIMS]
    specs += [_spec(arch, llama, kv_dtype=e4m3, split=True, out_dtype="float32")]
    specs += [_spec(arch, llama, kv_dtype=e5m2, **ITEMS), _spec(arch, llama, kv_dtype=e4m3, **MODIFIED[0], **GATHERED)]
    specs += [_spec(arch, llama, dtype="float16", out_dtype="float16", kv_dtype=stored) for stored in (e4m3, e5m2)]
    return specs


def _spec(
    arch: str,
    dims: tuple[int, int],
    *,
    dtype: str = "bfloat16",
    out_dtype: str = "bfloat16",
    full: bool = False,
    **rest: Any,
) -> KernelSpec:
    operands: Operands = "fp8" if dtype in FP8_DTYPES else "fp8_kv" if "kv_dtype" in rest else ""
    problem = TileProblem(dims, rest.get("kv", "dense"), operands, full=full)
    return Fa4Spec(dtype, out_dtype, *dims, tile=rule_of(arch, problem).value, **rest)
