"""Libraries that may be absent, and the reasons why something cannot be measured."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch


class UnavailableError(Exception):
    """The peer is not installed, or cannot run the workload."""


def require(condition: bool, reason: str) -> None:
    """Raises `UnavailableError` unless the condition holds."""
    if not condition:
        raise UnavailableError(reason)


def module(name: str) -> Any:
    """Imports a module; raises `UnavailableError` if that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} cannot be imported: {error}") from error


def flashinfer(name: str) -> Any:
    """Imports a FlashInfer module, set to build for this GPU only: a build for every arch takes many times as long."""
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    return module(name)
