"""The GPU that kernels run on, and kernels loaded there, or on the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from cute_attn.errors import ArgumentError, ArtifactError
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import MAX_DEVICES, Arch, for_device, multiprocessors
from cute_attn.runtime.launch import CPU, Launch
from cute_attn.runtime.spec import KernelSpec

T = TypeVar("T")

MAX_KERNELS = 512  # loaded, of some 0.3 MB of host memory each; a dropped one is not loaded again, only looked up


class Gpu(NamedTuple):
    """A CUDA device, or the emulator in its place."""

    arch: Arch
    device_index: int  # `runtime.launch.CPU`: kernels run on the emulator
    sms: int  # multiprocessors

    def loaded(self, kernel: KernelSpec, enable_pdl: bool | None = None) -> Launch:
        """Returns the loaded kernel. `enable_pdl`: what the user said on launches that may overlap the end of the
        kernel before (PDL).
        """
        return load(kernel, self.arch.name, self.device_index, self.arch.pdl and enable_pdl is not False)


@functools.lru_cache(MAX_DEVICES)
def of_device(index: int) -> Gpu:
    """Returns the GPU of CUDA device `index`."""
    return Gpu(for_device(index), index, multiprocessors(index))


def on_gpu(device: torch.device, run: Callable[[Gpu], T | None]) -> T | None:
    """Returns what `run` returns for the GPU of a device. None, having done nothing, for a device that no kernel runs
    on, and where none is compiled and there is no DSL.
    """
    if device.type != "cuda":
        return None
    try:
        gpu = of_device(device.index)
    except ArgumentError:
        return None
    try:
        return run(gpu)
    except ArtifactError:
        if artifacts.can_compile():
            raise
        return None


@functools.lru_cache(MAX_KERNELS)
def load(kernel: KernelSpec, arch_name: str, device_index: int, pdl: bool) -> Launch:
    """Returns the loaded kernel: one per spec and device, shared by problems that differ in head counts or numbers
    only. The first use may be under capture of a CUDA graph.
    """
    if device_index == CPU:
        from cute_attn.emulator.adapter import EmulatedLaunch

        return EmulatedLaunch(artifacts.get(kernel, arch_name, program), pdl=pdl)
    return Launch(artifacts.get(kernel, arch_name, program), device_index, pdl=pdl)
