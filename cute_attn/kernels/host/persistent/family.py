"""Kernel family of persistent kernels."""

from __future__ import annotations

import functools

from cute_attn.kernels.host.family import TiledFamily
from cute_attn.kernels.host.persistent.batch import batch_tiling, request_launch, request_tiling
from cute_attn.kernels.host.persistent.prepared import PersistentKernel
from cute_attn.kernels.host.persistent.variant import PersistentKernels, T


def family(kernels: PersistentKernels[T]) -> TiledFamily[T]:
    """Returns the family of these kernels."""
    return TiledFamily(
        kernels.name,
        kernels.specs,
        kernels.spec_of,
        functools.partial(request_tiling, kernels),
        request_launch,
        functools.partial(batch_tiling, kernels),
        functools.partial(PersistentKernel, kernels),
    )
