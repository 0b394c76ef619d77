"""Libraries that may be absent: what imports, and what cannot be measured for which reason."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch


class UnavailableError(Exception):
    """The peer is not here, or cannot express the workload."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnavailableError(reason)


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} does not import: {error}") from error


def flashinfer(name: str) -> Any:
    """A FlashInfer module, built for this GPU only: for every arch its build takes many times as long."""
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    return module(name)
