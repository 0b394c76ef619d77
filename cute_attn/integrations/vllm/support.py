"""What the backend supports of vLLM's configurations, and why not the rest: answers from the capabilities table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_attn.dispatch import select
from cute_attn.errors import ArgumentError
from cute_attn.problem import Features

DTYPES = (torch.float16, torch.bfloat16)
COPY, NVFP4 = "copy", "nvfp4"
# vLLM's names of cache dtypes, and how rows are stored: as they are, rounded to an fp8 dtype, or as NVFP4.
STORED = {
    "auto": COPY,
    "float16": COPY,
    "bfloat16": COPY,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "nvfp4": NVFP4,
}
HEADS = 8  # query heads and kv heads of the question to the table: no answer depends on them


class Asked(NamedTuple):
    """A configuration that vLLM asks about."""

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None = None  # one of vLLM's names; None: "auto"
    sinks: bool = False
    soft_cap: bool = False
    alibi: bool = False


def stored_as(kv_cache_dtype: str) -> str:
    """Return how rows are stored for one of vLLM's names of cache dtypes: "copy", "nvfp4" or an fp8 dtype's name."""
    if kv_cache_dtype not in STORED:
        raise NotImplementedError(f"kv_cache_dtype must be one of {', '.join(STORED)}, got {kv_cache_dtype!r}")
    return STORED[kv_cache_dtype]


def element(stored: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache as kernels read it. `dtype`: the model's."""
    if stored == COPY:
        return dtype
    return torch.uint8 if stored == NVFP4 else getattr(torch, stored)


def compute_capability_reason(major: int, minor: int) -> str | None:
    """Return why no backend runs on GPUs of a compute capability; None if one does."""
    try:
        refusals = select.refusals(_features(Asked(128, torch.bfloat16), decode=False), (major, minor))
    except ArgumentError as error:
        return str(error)
    return str(refusals[0]) if refusals else None


def cache_reason(kv_cache_dtype: str, dtype: torch.dtype) -> str | None:
    """Return why a 16-bit cache is not supported under a model of `dtype`; None if it is, or has fewer bits."""
    if {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype, dtype) == dtype:
        return None
    return f"a 16-bit KV cache must have the model's dtype {dtype}, got kv_cache_dtype {kv_cache_dtype!r}"


def reason(asked: Asked, capability: tuple[int, int]) -> str | None:
    """Return why a configuration is not supported on GPUs of a compute capability; None if it is."""
    kv_cache_dtype = asked.kv_cache_dtype or "auto"
    if found := cache_reason(kv_cache_dtype, asked.dtype):
        return found
    if kv_cache_dtype not in STORED:
        return f"kv_cache_dtype must be one of {', '.join(STORED)}, got {kv_cache_dtype!r}"
    if STORED[kv_cache_dtype] != COPY and asked.head_size % 16:
        return f"8-bit and 4-bit caches are written in blocks of 16 elements, got head_size {asked.head_size}"
    try:
        refusals = select.refusals(_features(asked, decode=False), capability)
    except ArgumentError as error:
        return str(error)
    # Those of fa2, which runs on every GPU here; the others have these and more.
    return (
        "; ".join(f"{feature}: {why}. Instead: {instead}" for name, feature, why, instead in refusals if name == "fa2")
        or None
    )


def decodes_without_plan(asked: Asked, capability: tuple[int, int] | None) -> bool:
    """Tell whether decode reads lengths and block tables on the device, so that CUDA graphs can contain it.

    `capability`: of the GPU; None: CPU tensors, where the reference has the limits of no GPU but those of the call.
    """
    if asked.soft_cap or asked.alibi:  # not among the arguments of the decode call
        return False
    return capability is None or not select.refusals(_features(asked, decode=True), capability)


def _features(asked: Asked, decode: bool) -> Features:
    """Return the question to the table: paged prefill by a plan, or decode without one."""
    stored = STORED[asked.kv_cache_dtype or "auto"]
    return Features(
        device=torch.device("cuda"),
        q_dtype=asked.dtype,
        kv_dtype=element(stored, asked.dtype),
        o_dtype=asked.dtype,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim_qk=asked.head_size,
        head_dim_vo=asked.head_size,
        soft_cap=asked.soft_cap,
        pos_encoding_mode="ALIBI" if asked.alibi else "NONE",
        kv_block_scales=stored == NVFP4,
        sinks=asked.sinks,
        kv_source="paged",
        decode=decode,
        device_lengths=decode,
    )
