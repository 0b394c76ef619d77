"""Which mma.sync kernels solve problems of given features, and where they are loaded."""

from __future__ import annotations

import functools

from cute_attn.checks import short
from cute_attn.kernels import tiles
from cute_attn.kernels.spec import CombineSpec, Fa2Spec, KernelSpec, Tile
from cute_attn.problem import Features
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.launch import CPU, Launch


def batched(features: Features) -> bool:
    return features.kv_source != "dense"


def spec(features: Features, tile: Tile, split: bool = False) -> Fa2Spec:
    """The kernel that solves problems of these features with this tile. Items of a batch write partials or not as
    their records say; of a single request, all do or none (`split`).
    """
    return Fa2Spec(
        dtype=short(features.q_dtype),
        out_dtype="float32" if split else short(features.o_dtype),
        head_dim_qk=features.head_dim_qk,
        head_dim_vo=features.head_dim_vo,
        mask="packed" if features.custom_mask else "band",
        scores=scores(features),
        pos_encoding="rope" if features.pos_encoding_mode == "ROPE_LLAMA" else "none",
        split=split,
        schedule=_schedule(features),
        kv="paged" if features.kv_source == "paged" else "dense",
        kv_dtype=kv_dtype(features),
        tile=tile,
    )


def combine_spec(features: Features) -> CombineSpec:
    return CombineSpec(short(features.o_dtype), features.head_dim_vo, _schedule(features))


def kv_dtype(features: Features) -> str:
    """Of `spec.KV_BITS`."""
    if features.kv_block_scales:
        return "nvfp4"
    return "" if features.kv_dtype == features.q_dtype else short(features.kv_dtype)


def scores(features: Features) -> tuple[str, ...]:
    """Score steps. A positive scale alone is none: it goes into the exponent together with log2(e)."""
    steps = ["scale"]
    if features.pos_encoding_mode == "ALIBI":
        steps.append("alibi")
    if features.soft_cap:
        steps.append("soft_cap")
    return () if steps == ["scale"] and features.positive_scale else tuple(steps)


def variant(features: Features) -> tiles.Variant:
    """What tiles depend on."""
    plain = not features.custom_mask and features.pos_encoding_mode != "ROPE_LLAMA" and not scores(features)
    return tiles.Variant((features.head_dim_qk, features.head_dim_vo), plain, batched(features), kv_dtype(features))


def specs(features: Features, arch: Arch) -> list[KernelSpec]:
    """Every kernel that calls of these features may need, whatever their lengths."""
    kernels: list[KernelSpec] = [
        spec(features, tile, split)
        for tile in tiles.candidates(variant(features), arch)
        for split in ((False,) if batched(features) else (False, True))
    ]
    return [*kernels, combine_spec(features)]


@functools.cache
def load(kernel: KernelSpec, arch_name: str, device_index: int, pdl: bool) -> Launch:
    """The loaded kernel: one per spec and device, shared by problems that differ in head counts or numbers only."""
    if device_index == CPU:
        from cute_attn.emulator.adapter import EmulatedLaunch

        return EmulatedLaunch(artifacts.get(kernel, arch_name), pdl=pdl)
    return Launch(artifacts.get(kernel, arch_name), device_index, pdl=pdl)


def _schedule(features: Features) -> str:
    return "items" if batched(features) else "grid"
