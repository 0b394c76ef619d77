"""Instruction forms, one module per family. Importing a module registers its forms."""

from __future__ import annotations

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
    "bulk",
    "tma",
    "wgmma",
    "clusters",
    "setmaxnreg",
    "tmem",
    "umma",
    "launch_control",
)


def load() -> None:
    """Register every form."""
    for name in MODULES:
        importlib.import_module(f"cute_attn.emulator.isa.{name}")
