"""Instruction forms: one module a family; importing it registers them."""

from __future__ import annotations

import functools
import importlib

MODULES = (
    "arithmetic",
    "approximate",
    "bits",
    "convert",
    "control",
    "loads",
    "atomics",
    "warp",
    "mma",
    "copies",
    "barriers",
    "mbarrier",
    "tma",
    "wgmma",
    "clusters",
)


@functools.cache
def load() -> None:
    """Register every form."""
    for name in MODULES:
        importlib.import_module(f"cute_attn.emulator.isa.{name}")
