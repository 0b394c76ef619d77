"""Runs requests that write rows to caches: by the kernel on CUDA tensors, by torch operations on others."""

from __future__ import annotations

import functools

import torch

from cute_attn.dispatch import emulator
from cute_attn.emulator import adapter
from cute_attn.errors import ArgumentError
from cute_attn.kernels.append.host import launch
from cute_attn.kernels.host.gpu import has_run
from cute_attn.request.append import Append, reference


def run(append: Append) -> None:
    """Writes the rows. Where no kernel can (none compiled and no DSL, or rows that it does not take), torch operations
    do it.
    """
    if not has_run(append.caches[0].device, functools.partial(launch.run, append)):
        reference(append)


def emulate(append: Append) -> None:
    """Runs the kernel for CPU tensors on the architecture that is emulated now. For tests.

    Raises ArgumentError for a request that does not fit the kernel.
    """
    inputs = {f"rows[{i}]": x for i, x in enumerate(append.rows)}
    inputs |= {f"slots[{i}]": x for i, x in enumerate(append.slots)}
    inputs |= {f"scales[{i}]": x for i, x in enumerate(append.scales) if isinstance(x, torch.Tensor)}
    outputs = {f"caches[{i}]": x for i, x in enumerate(append.caches)}
    outputs |= {f"block_scales[{i}]": x for i, x in enumerate(append.block_scales)}
    with adapter.visible(inputs, outputs):
        written = launch.run(append, emulator.emulated_gpu())
    if not written and append.rows[0].numel() and append.caches[0].numel():
        raise ArgumentError("the append kernel cannot run this request: fp8 needs rows of whole blocks of 16 elements")
