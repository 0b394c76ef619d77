"""The GPU that kernels run on."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cute_attn.errors import ArgumentError
from cute_attn.problem import Settings
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


def supported(index: int) -> Gpu | None:
    """Returns the GPU of CUDA device `index`; None for one that no kernel runs on."""
    try:
        return of_device(index)
    except ArgumentError:
        return None
