"""The GPU that kernels run on, or that schedules are made for."""

from __future__ import annotations

from typing import NamedTuple

from cute_attn.problem import Settings
from cute_attn.runtime.arch import Arch, for_device, multiprocessors


class Gpu(NamedTuple):
    arch: Arch
    device_index: int  # `runtime.launch.CPU`: kernels run on the emulator
    sms: int  # multiprocessors

    def pdl(self, settings: Settings) -> bool:
        """Whether launches of these settings may overlap the end of the kernel before."""
        return self.arch.pdl and settings.enable_pdl is not False


def of_device(index: int) -> Gpu:
    """CUDA device `index`."""
    return Gpu(for_device(index), index, multiprocessors(index))
