"""Version and toolkit flavour of the installed CuTe DSL, without importing it.

The DSL's libraries, ptxas among them, come in flavours for CUDA 12 and 13: `nvidia-cutlass-dsl` installs the first,
its extra "cu13" both. With several installed, the DSL takes the newest that the driver supports.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import re

PACKAGE = "nvidia-cutlass-dsl"
_MAJORS = range(12, 20)
_FLAVOUR = re.compile(r" cu(\d+)$")


@functools.cache
def version() -> str | None:
    """Returns version and flavour of the installed DSL ("4.8.1 cu13"); None if it is absent."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{importlib.metadata.version(PACKAGE)} {_flavour()}"
    return None


def cuda_major(dsl: str) -> int:
    """Returns the CUDA version whose drivers load what a DSL has compiled: 13 for "4.8.1 cu13". 0: not known."""
    found = _FLAVOUR.search(dsl)
    return int(found[1]) if found else 0


def _flavour() -> str:
    majors = []
    for major in _MAJORS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(f"{PACKAGE}-libs-cu{major}")
            majors.append(major)
    limit = _driver_major() if len(majors) > 1 else None
    return f"cu{max((m for m in majors if limit is None or m <= limit), default='?')}"


def _driver_major() -> int | None:
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return number.value // 1000 if status == 0 else None
