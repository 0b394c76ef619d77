"""What the features of a request mean for the kernels of every family."""

from __future__ import annotations

from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.problem import Features, short


def batched(features: Features) -> bool:
    return features.kv_source != "dense"


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


def _schedule(features: Features) -> str:
    return "items" if batched(features) else "grid"
