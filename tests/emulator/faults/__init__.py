"""Faults of our kernels: each changes one place of their sources and names the tests that must detect it.

`inject` puts them into a copy of the project and runs these tests there. If no test can detect a fault, `excuse` says
why.
"""

from __future__ import annotations

from tests.emulator.faults.blackwell import BLACKWELL
from tests.emulator.faults.combine import COMBINING
from tests.emulator.faults.fault import Fault, listed
from tests.emulator.faults.fp8 import FP8_FAULTS
from tests.emulator.faults.head_dims import HEAD_DIM_FAULTS
from tests.emulator.faults.hopper import PERSISTENT, RECOMPUTE, SHARED_TILES, TILES
from tests.emulator.faults.latent import LATENT_FAULTS
from tests.emulator.faults.pages import GATHERED
from tests.emulator.faults.xqa import XQA_FAULTS

__all__ = ["FAULTS", "Fault"]

HOPPER = (RECOMPUTE, TILES, SHARED_TILES, PERSISTENT, GATHERED, FP8_FAULTS)
FAULTS = (
    *listed(*HOPPER, *BLACKWELL),
    *XQA_FAULTS,
    *listed(*LATENT_FAULTS, COMBINING, HEAD_DIM_FAULTS),
)
