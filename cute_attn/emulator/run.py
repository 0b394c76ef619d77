"""Entry point of the emulator: one launch, from a PTX text, a launch description and global memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator.machine import Grid, Stats
from cute_attn.emulator.memory import GlobalMemory
from cute_attn.emulator.program import program
from cute_attn.emulator.schedule import Schedule


def launch(
    ptx: str,
    description: dict[str, Any],
    memory: GlobalMemory,
    *,
    checks: bool = True,
    schedule: Schedule = Schedule(),  # noqa: B008 (frozen)
    events: bool = False,
    strict: bool = True,
) -> Stats:
    """Execute the kernel `description["symbol"]` of `ptx` on `memory`, in place.

    `description`: symbol, grid, block, cluster, smem_bytes, pdl, params (bytes) and, where parameters are not laid out
    back to back from offset 0, param_offsets; registers (of a thread) if known.
    `checks` adds checks of races and proxy fences to those of bounds and initialisation; `events` records what a
    timeline needs. `strict`: order in tensor memory needs tcgen05.wait::ld and tcgen05.fence, as the PTX ISA has it;
    without it a tcgen05.ld is over at once and barriers order tensor memory alone. Raises EmulatorError, which says
    what is wrong and where.
    """
    kernel = program(ptx, description["symbol"])
    for region in memory.regions:
        region.start_launch(bool(description.get("pdl")))
    with np.errstate(all="ignore"):
        grid = Grid(kernel, description, memory, checks=checks, schedule=schedule, events=events, strict=strict)
        return grid.run()
