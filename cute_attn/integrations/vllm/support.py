"""What the backend supports of vLLM's configurations, and why not the rest: answers from the capabilities table."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_attn.dispatch import select
from cute_attn.errors import ArgumentError
from cute_attn.problem import Features

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
LATENT_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")  # of a latent cache


class Layer(NamedTuple):
    """What is known of a layer when its model is made."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    kv_cache_dtype: str = "auto"
    window_left: int = -1  # keys before a token's own that it sees; -1: all
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    encoder: bool = False  # its keys are those of the query tokens, all of which see each other

    @property
    def pos_encoding_mode(self) -> str:
        """The wrappers' name of what scores get by position."""
        return "ALIBI" if self.alibi else "NONE"


def stored_as(kv_cache_dtype: str) -> str:
    """Return how rows are stored for one of vLLM's names of cache dtypes: "copy", "nvfp4" or an fp8 dtype's name."""
    if kv_cache_dtype not in STORED:
        raise NotImplementedError(f"kv_cache_dtype must be one of {', '.join(STORED)}, got {kv_cache_dtype!r}")
    return STORED[kv_cache_dtype]


def compute_capability_reason(major: int, minor: int) -> str | None:
    """Return why no backend runs on GPUs of a compute capability; None if one does."""
    return reason(Layer(8, 128, 1.0, 8), torch.bfloat16, (major, minor))


def cache_reason(kv_cache_dtype: str, dtype: torch.dtype) -> str | None:
    """Return why a 16-bit cache is not supported under a model of `dtype`; None if it is, or has fewer bits."""
    if {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype, dtype) == dtype:
        return None
    return f"a 16-bit KV cache must have the model's dtype {dtype}, got kv_cache_dtype {kv_cache_dtype!r}"


def reason(layer: Layer, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why a layer of a model of `dtype` is not supported on GPUs of a compute capability; None if it is."""
    if found := cache_reason(layer.kv_cache_dtype, dtype):
        return found
    try:
        if stored_as(layer.kv_cache_dtype) != COPY and layer.head_size % 16:
            return f"8-bit and 4-bit caches are written in blocks of 16 elements, got head_size {layer.head_size}"
        refusals = select.refusals(_features(layer, dtype, decode=False), capability)
    except (ArgumentError, NotImplementedError) as error:
        return str(error)
    # Those of fa2, which runs on every GPU here; the others have these and more.
    return (
        "; ".join(f"{feature}: {why}. Instead: {instead}" for name, feature, why, instead in refusals if name == "fa2")
        or None
    )


def decodes_without_plan(layer: Layer, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Tell whether decode reads lengths and block tables on the device, so that CUDA graphs can contain it.

    `capability`: of the GPU; None: CPU tensors, where the reference has the limits of no GPU but those of the call.
    """
    if layer.soft_cap > 0 or layer.alibi:  # not among the arguments of the decode call
        return False
    return capability is None or not select.refusals(_features(layer, dtype, decode=True), capability)


def _features(layer: Layer, dtype: torch.dtype, decode: bool) -> Features:
    """Return the question to the table: paged prefill by a plan, or decode without one."""
    stored = STORED[layer.kv_cache_dtype]
    kv_dtype = {COPY: dtype, NVFP4: torch.uint8}.get(stored) or getattr(torch, stored)
    return Features(
        device=torch.device("cuda"),
        q_dtype=dtype,
        kv_dtype=kv_dtype,
        o_dtype=dtype,
        num_qo_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim_qk=layer.head_size,
        head_dim_vo=layer.head_size,
        soft_cap=layer.soft_cap > 0,
        pos_encoding_mode=layer.pos_encoding_mode,
        kv_block_scales=stored == NVFP4,
        sinks=layer.sinks,
        kv_source="paged",
        decode=decode,
        device_lengths=decode,
    )
