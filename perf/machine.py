"""Machine that the results belong to: its hardware, versions and clock, and libraries that may be absent."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cute_attn

PACKAGES = ("torch", "nvidia-cutlass-dsl", "cuda-bindings", "flash-attn-4", "flashinfer-python")
QUERIED = {
    "driver": "driver_version",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
}


def why_no_gpu() -> str | None:
    """Returns why nothing can be measured on this machine, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (no GPU, or no driver)"
    return None


def environment() -> dict[str, str]:
    """Returns GPU, host, versions, commit and date of a record. `PERF_COMMIT` names the commit outside a checkout."""
    return {
        **_device(),
        "host": _processor(),
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "cute_attn": cute_attn.__version__,
        **{package: _version(package) for package in PACKAGES},
        "commit": os.environ.get("PERF_COMMIT") or _output(["git", "rev-parse", "--short", "HEAD"]) or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _device() -> dict[str, str]:
    if absent := why_no_gpu():
        return {"gpu": f"no GPU: {absent}", "compute_capability": "none", "driver": "none"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sms": str(properties.multi_processor_count),
        "l2_bytes": str(properties.L2_cache_size),
        "memory_bytes": str(properties.total_memory),
        **{name: nvidia_smi(field) or "unknown" for name, field in QUERIED.items()},
    }


def _processor() -> str:
    """Returns the name of the processor, which host times depend on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()


def nvidia_smi(field: str) -> str | None:
    """Returns one field of `nvidia-smi --query-gpu` for torch's current device, identified by its UUID."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}"]
    return _output(query)


# ---- libraries that may be absent


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
