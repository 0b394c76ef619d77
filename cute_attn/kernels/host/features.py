"""Fields of kernel specs that follow from the features of a request in every family."""

from __future__ import annotations

from cute_attn.kernels.combine.spec import CombineSpec
from cute_attn.problem import Features, short


def batched(features: Features) -> bool:
    """Tells whether these are features of a batch."""
    return features.kv_source != "dense"


def combine_spec(features: Features) -> CombineSpec:
    """Returns the spec of the kernel that merges split-KV partials."""
    return CombineSpec(short(features.o_dtype), features.head_dim_vo, schedule(features))


def kv_dtype(features: Features) -> str:
    """Returns `kv_dtype` of a spec, a key of `formats.KV_BITS`."""
    if features.kv_block_scales:
        return "nvfp4"
    return "" if features.kv_dtype == features.q_dtype else short(features.kv_dtype)


def score_steps(features: Features) -> tuple[str, ...]:
    """Returns `scores` of a spec. A positive scale alone is no step: it is multiplied by log2(e) and applied in the
    exponent.
    """
    steps = ["scale"]
    if features.pos_encoding_mode == "ALIBI":
        steps.append("alibi")
    if features.soft_cap:
        steps.append("soft_cap")
    return () if steps == ["scale"] and features.positive_scale else tuple(steps)


def rotates(features: Features) -> bool:
    """Tells whether q and k are rotated."""
    return features.pos_encoding_mode == "ROPE_LLAMA"


def schedule(features: Features) -> str:
    """Returns `schedule` of a spec: "items" of a batch, or the "grid" of a single request."""
    return "items" if batched(features) else "grid"
