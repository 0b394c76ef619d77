"""Scales of a launch, from its parameters and from device memory."""

from typing import Any

from cutlass import Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.scalars import device_scale


def log2_scale(p: Any, factor: float) -> Float32:
    """Returns the factor from scores to base-2 exponents; `p`: XqaParams. K counts as `factor` times what it is."""
    device_scales = device_scale(p.scale_ptr) * device_scale(p.more_scale_ptr)
    return p.scale * device_scales * Float32(ptx.LOG2E * factor)


def final_epilogue(p: Any, factor: float) -> FinalEpilogue:
    """Returns the epilogue of final outputs, where V counts as `factor` times what it is."""
    v_scale = p.v_scale * device_scale(p.v_scale_ptr) * Float32(factor)
    return FinalEpilogue(p.sinks, v_scale, p.lse_scale)
