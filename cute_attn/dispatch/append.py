"""Runs requests that write rows to caches: by the kernel on CUDA tensors, by torch operations on others."""

from __future__ import annotations

import functools

from cute_attn.kernels.append.host import launch
from cute_attn.kernels.host.gpu import has_run
from cute_attn.request.append import Append, reference


def run(append: Append) -> None:
    """Writes the rows. Where no kernel can (none compiled and no DSL, or rows that it does not take), torch operations
    do it.
    """
    if not has_run(append.caches[0].device, functools.partial(launch.run, append)):
        reference(append)
