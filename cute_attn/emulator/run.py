"""Run one launch: what `runtime.launch.describe` gives, a PTX text and global memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator.machine import Grid, Policy, Schedule, Stats
from cute_attn.emulator.memory import GlobalMemory
from cute_attn.emulator.program import program


def launch(
    ptx: str,
    description: dict[str, Any],
    memory: GlobalMemory,
    *,
    checks: bool = True,
    schedule: Schedule = Schedule(),  # noqa: B008 (frozen)
    events: bool = False,
) -> Stats:
    """Execute the kernel `description["symbol"]` of `ptx` on `memory`, in place.

    `description` holds symbol, grid, block, cluster, smem_bytes, pdl, params (bytes) and, where parameters do not lie
    one after the other from 0, param_offsets. With `checks`, every
    access is checked for races, bounds and initialisation; with `events` the stats keep what a timeline needs.
    EmulatorError says what is wrong, and where.
    """
    kernel = program(ptx, description["symbol"])
    for region in memory.regions:
        region.settle(bool(description.get("pdl")))
    with np.errstate(all="ignore"):
        return Grid(kernel, description, memory, Policy(checks, schedule, events)).run()
