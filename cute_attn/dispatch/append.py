"""Runs requests that write rows to caches: by the kernel on CUDA tensors, by torch operations on others."""

from __future__ import annotations

import functools

from cute_attn.kernels.append.host import launch
from cute_attn.kernels.host.gpu import on_gpu
from cute_attn.kernels.host.operands import Fire
from cute_attn.request.append import Append, reference


def run(append: Append) -> Fire | None:
    """Writes the rows, and returns what writes those of requests that differ in addresses. Where no kernel can (none
    compiled and no DSL, or rows that it does not take), torch operations do it, and the result is None.
    """
    fire = on_gpu(append.caches[0].device, functools.partial(launch.run, append))
    if fire is None:
        reference(append)
    return fire
