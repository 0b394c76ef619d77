"""Specs of the Blackwell kernel that the compile gate builds."""

from __future__ import annotations

import functools
from typing import Any

from cute_attn.kernels.blocks.default_specs import GATHERED, HARDEST, ITEMS, LLAMA, SPLIT, shared_specs
from cute_attn.kernels.blocks.tiles import FP8_HEAD_DIMS, HEAD_DIMS, Operands, TileProblem
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.tiles import rule_of
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec


def default_specs(gpu: Arch) -> list[KernelSpec]:
    """Lists the specs to compile: those of both persistent families, and those that only Blackwell's has."""
    spec = functools.partial(_spec, gpu.name)
    scores = {"scores": HARDEST["scores"]}
    specs = [*shared_specs(spec, HEAD_DIMS), spec(LLAMA, **HARDEST), spec((192, 128), mask="band", **ITEMS)]
    specs += [spec((192, 128), full=True, **source) for source in ({}, ITEMS)]
    in_pairs: tuple[dict[str, Any], ...] = ({}, ITEMS, scores, scores | ITEMS, {"schedule": "items"}, SPLIT)
    specs += [spec(LLAMA, full=True, **rest) for rest in in_pairs]
    specs += [spec(dims, dtype=FP8_DTYPES[0], **GATHERED) for dims in FP8_HEAD_DIMS]
    return [*specs, spec(LLAMA, kv_dtype=FP8_DTYPES[0], **HARDEST, **GATHERED)]


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
