"""Runs requests that write rows to caches: by the kernel on CUDA tensors, by torch operations on others."""

from __future__ import annotations

import torch

from cute_attn.emulator import adapter, settings
from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.kernels.append.host import launch
from cute_attn.kernels.host import gpu as gpus
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.request.append import Append, reference
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import TYPICAL_SMS, named
from cute_attn.runtime.launch import CPU


def run(append: Append) -> None:
    """Writes the rows. Where no kernel can (none compiled and no DSL, or rows that it does not take), torch operations
    do it.
    """
    device = append.caches[0].device
    gpu = gpus.supported(device.index) if device.type == "cuda" else None
    try:
        written = gpu is not None and launch.run(append, gpu)
    except ArtifactError:
        if artifacts.can_compile():
            raise
        written = False
    if not written:
        reference(append)


def emulate(append: Append) -> None:
    """Runs the kernel for CPU tensors on the architecture that is emulated now. For tests.

    Raises ArgumentError for a request that does not fit the kernel.
    """
    arch = settings.current().arch
    inputs = {f"rows[{i}]": x for i, x in enumerate(append.rows)}
    inputs |= {f"slots[{i}]": x for i, x in enumerate(append.slots)}
    inputs |= {f"scales[{i}]": x for i, x in enumerate(append.scales) if isinstance(x, torch.Tensor)}
    outputs = {f"caches[{i}]": x for i, x in enumerate(append.caches)}
    outputs |= {f"block_scales[{i}]": x for i, x in enumerate(append.block_scales)}
    with adapter.visible(inputs, outputs):
        written = launch.run(append, Gpu(named(arch), CPU, TYPICAL_SMS[arch]))
    if not written and append.rows[0].numel() and append.caches[0].numel():
        raise ArgumentError("the append kernel cannot run this request: fp8 needs rows of whole blocks of 16 elements")
