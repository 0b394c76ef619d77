"""Instruction forms, one module per family. Importing a module registers its forms."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Register every form."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
