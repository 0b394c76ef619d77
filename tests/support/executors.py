"""What can run a problem: the reference, the emulator of an architecture, a GPU. One test body for all of them."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from cute_attn import emulator


@dataclass(frozen=True)
class Executor:
    """`backend` and `device` of a call that runs inside `active`. `arch`: the GPU that is emulated, or "".
    `kernels`: see `emulator.using`.
    """

    name: str
    backend: str
    device: str
    arch: str = ""
    kernels: str = "auto"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with emulator.using(self.arch, kernels=self.kernels) if self.arch else contextlib.nullcontext():
            yield


REFERENCE = Executor("reference", "reference", "cpu")
CUDA = Executor("cuda", "auto", "cuda")


def emulated(arch: str, kernels: str = "fa2") -> Executor:
    return Executor(f"emulator-{arch}", "emulator", "cpu", arch, kernels)


HAS_GPU = torch.cuda.is_available()
GPU_MARKS = (pytest.mark.gpu, pytest.mark.sm80, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=GPU_MARKS)]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs triton")


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs on a GPU alone."""
    for mark in GPU_MARKS:
        test = mark(test)
    return test


AMPERE, HOPPER = emulated("sm_80"), emulated("sm_90a")
PARAMS = [
    pytest.param(REFERENCE, id=REFERENCE.name),
    pytest.param(HOPPER, id=HOPPER.name, marks=pytest.mark.emulator),
    pytest.param(CUDA, id=CUDA.name, marks=GPU_MARKS),
]
