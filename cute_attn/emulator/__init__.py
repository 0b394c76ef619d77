"""PTX emulator for testing kernels without a GPU. Everything but `adapter` depends on numpy alone."""

from cute_attn.emulator.errors import EmulatorError
from cute_attn.emulator.machine import Schedule, Stats
from cute_attn.emulator.memory import GlobalMemory
from cute_attn.emulator.run import launch
from cute_attn.emulator.settings import using

__all__ = ["EmulatorError", "GlobalMemory", "Schedule", "Stats", "launch", "using"]
