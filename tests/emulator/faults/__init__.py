"""Faults of our kernels: a line of their sources said otherwise, and the tests that must notice.

`inject` puts them into a copy of the project and runs those tests there. Where a fault breaks nothing that can be
seen, `equivalent` says why.
"""

from __future__ import annotations

from tests.emulator.faults.combine import COMBINING
from tests.emulator.faults.fault import Fault
from tests.emulator.faults.fp8 import FP8_FAULTS
from tests.emulator.faults.hopper import HINDSIGHT, PERSISTENT, TILES
from tests.emulator.faults.pages import GATHERED
from tests.emulator.faults.xqa import XQA_FAULTS

__all__ = ["FAULTS", "Fault"]

FAULTS = (*HINDSIGHT, *TILES, *PERSISTENT, *GATHERED, *FP8_FAULTS, *XQA_FAULTS, *COMBINING)
