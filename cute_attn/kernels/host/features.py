"""What the features of a request mean for the kernels of every family."""

from __future__ import annotations

from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.problem import Features, short


def batched(features: Features) -> bool:
    """Whether these are features of a batch, which has a schedule of items."""
    return features.kv_source != "dense"


def combine_spec(features: Features) -> CombineSpec:
    """The kernel that merges split-KV partials."""
    return CombineSpec(short(features.o_dtype), features.head_dim_vo, schedule(features))


def kv_dtype(features: Features) -> str:
    """`kv_dtype` of a spec, one of `formats.KV_BITS`."""
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


def schedule(features: Features) -> str:
    """`schedule` of a spec: items of a batch, or the grid of a single request."""
    return "items" if batched(features) else "grid"
