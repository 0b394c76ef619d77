# ruff: noqa: N802  (the driver's names)
"""A GPU that takes launches and does nothing: host code of GPU backends on CPU tensors, to be timed without a GPU.

Kernels are compiled for the architecture as on a machine with one, so that parameter blocks are the real ones. Plans
are copied within host memory, and torch allocates on the CPU: both are cheaper than on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_attn.dispatch import backends, select
from cute_attn.dispatch import mla as dispatch_mla
from cute_attn.dispatch.capabilities import UNKNOWN_LOAD, Backend, Load
from cute_attn.emulator import adapter
from cute_attn.kernels.host import gpu as loader
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.prepared import prepared
from cute_attn.kernels.mla.host import launch as mla_launch
from cute_attn.problem import Features
from cute_attn.runtime import arch as archs
from cute_attn.runtime import launch
from cute_attn.wrappers import calls

CONTEXT = 1


class NullDriver:
    """The driver's functions that a launch calls."""

    launches = 0

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 1 << 20

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, CONTEXT

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[int]:
        self.launches += 1
        return (0,)


def always(result: Any) -> Callable[..., Any]:
    """Return a function that returns this. Unlike a mock it keeps no calls."""
    return lambda *_: result


@contextlib.contextmanager
def pretended_gpu(arch_name: str) -> Iterator[NullDriver]:
    """Send calls with CPU tensors to the kernels that "auto" takes on such a GPU, whose driver does nothing."""
    arch, driver, choose = archs.named(arch_name), NullDriver(), select.choose
    gpu = Gpu(arch, launch.CPU, archs.TYPICAL_SMS[arch_name])

    def chosen(features: Features, backend: str = "auto", _: object = None, load: Load = UNKNOWN_LOAD) -> Backend:
        return choose(features._replace(device=torch.device("cuda", 0)), backend, arch, load)

    patches = (
        mock.patch.object(launch, "load_driver", always(driver)),
        mock.patch.object(launch, "primary_context", always(CONTEXT)),
        mock.patch.object(launch, "_function", always(1)),
        mock.patch.object(launch, "_config", lambda *given: SimpleNamespace(given=given)),
        mock.patch.object(archs, "for_device", always(arch)),
        mock.patch.object(adapter, "EmulatedLaunch", functools.partial(launch.Launch, device_index=0)),
        mock.patch.object(select, "choose", chosen),
        mock.patch.object(select, "arch_for", always(arch)),
        mock.patch.object(backends, "_gpu_of", always(gpu)),
        mock.patch.object(dispatch_mla, "run", lambda problem, backend: mla_launch.run(problem, gpu)),
        mock.patch.object(calls, "looks_at_values", always(False)),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        calls.UNPLANNED.clear()
        stack.callback(calls.UNPLANNED.clear)
        for memo in (select.chosen, loader.load, prepared):
            memo.cache_clear()
            stack.callback(memo.cache_clear)
        yield driver
