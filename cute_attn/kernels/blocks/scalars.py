"""Small functions that every kernel uses: parameters for tracing, scales in device memory, places of a thread."""

import typing
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx


def zeros(params: Any) -> Any:
    """Returns a parameter tuple of the right types; tracing uses nothing else."""
    kinds = typing.get_type_hints(params).values()
    return params(*(zeros(kind) if hasattr(kind, "_fields") else kind(0) for kind in kinds))


def scalars_of(params: Any) -> dict[str, Any]:
    """Returns names and types of the scalars of a parameter tuple. Of a field that is a tuple itself, the first has the
    field's name, the others theirs behind that.
    """
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(params).items():
        first, *others = scalars_of(kind).items() if hasattr(kind, "_fields") else [("", kind)]
        found |= {name: first[1]} | {f"{name}_{part}": other for part, other in others}
    return found


def shared_memory() -> Int32:
    """Address of the CTA's dynamic shared memory."""
    return cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint().to(Int32)


def warp_index() -> Int32:
    """Returns the index of this thread's warp in the CTA, in a uniform register."""
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] >> 5)


@cute.jit
def head_scale(base: Int64, head: Int32) -> Float32:
    """Loads a head's scale from an fp32 array in device memory; 1 if the address is 0."""
    scale = Float32(1.0)
    if base != Int64(0):
        scale = ptx.ld_global_f32(base + Int64(head) * Int64(4))
    return scale


def device_scale(address: Int64) -> Float32:
    """Loads a scale from device memory; 1 if the address is 0."""
    return head_scale(address, Int32(0))
