"""The GPU that kernels run on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.problem import Settings
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import MAX_DEVICES, Arch, for_device, multiprocessors


class Gpu(NamedTuple):
    """A CUDA device, or the emulator in its place."""

    arch: Arch
    device_index: int  # `runtime.launch.CPU`: kernels run on the emulator
    sms: int  # multiprocessors

    def pdl(self, settings: Settings) -> bool:
        """Tells whether launches of these settings may overlap the end of the kernel before (PDL)."""
        return self.arch.pdl and settings.enable_pdl is not False


@functools.lru_cache(MAX_DEVICES)
def of_device(index: int) -> Gpu:
    """Returns the GPU of CUDA device `index`."""
    return Gpu(for_device(index), index, multiprocessors(index))


def has_run(device: torch.device, run: Callable[[Gpu], bool]) -> bool:
    """Tells whether `run` says so of the GPU of a device. False too, having done nothing, for a device that no kernel
    runs on, and where none is compiled and there is no DSL.
    """
    if device.type != "cuda":
        return False
    try:
        gpu = of_device(device.index)
    except ArgumentError:
        return False
    try:
        return run(gpu)
    except ArtifactError:
        if artifacts.can_compile():
            raise
        return False
