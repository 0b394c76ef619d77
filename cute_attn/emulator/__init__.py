"""PTX emulator for testing kernels without a GPU. Everything but `adapter` depends on numpy alone.

Names load at their first use: dispatch asks for settings of the emulator in every process, few run it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_attn.emulator.errors import EmulatorError
    from cute_attn.emulator.machine import Stats, launch
    from cute_attn.emulator.memory import GlobalMemory
    from cute_attn.emulator.schedule import Schedule
    from cute_attn.emulator.settings import using

_MODULES = {
    "EmulatorError": "errors",
    "GlobalMemory": "memory",
    "Schedule": "schedule",
    "Stats": "machine",
    "launch": "machine",
    "using": "settings",
}

__all__ = ["EmulatorError", "GlobalMemory", "Schedule", "Stats", "launch", "using"]


def __getattr__(name: str) -> Any:
    """Load the module that has `name`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
