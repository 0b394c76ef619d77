"""Loads kernels onto devices, or onto the emulator."""

from __future__ import annotations

import functools

from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts
from cute_attn.runtime.launch import CPU, Launch
from cute_attn.runtime.spec import KernelSpec

MAX_KERNELS = 512  # loaded, of some 0.3 MB of host memory each; a dropped one is not loaded again, only looked up


@functools.lru_cache(MAX_KERNELS)
def load(kernel: KernelSpec, arch_name: str, device_index: int, pdl: bool) -> Launch:
    """Returns the loaded kernel: one per spec and device, shared by problems that differ in head counts or numbers
    only. The first use may be under capture of a CUDA graph.
    """
    if device_index == CPU:
        from cute_attn.emulator.adapter import EmulatedLaunch

        return EmulatedLaunch(artifacts.get(kernel, arch_name, program), pdl=pdl)
    return Launch(artifacts.get(kernel, arch_name, program), device_index, pdl=pdl)
