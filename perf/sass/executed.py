"""Executions of PTX lines, by warp: what an emulated launch ran, less repeated tests of barriers."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import numpy as np

from cute_attn.emulator import machine
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.program import Block, program
from cute_attn.emulator.timeline import Event
from cute_attn.emulator.warp_batch import WarpBatch

Lines = Mapping[int, Array]  # line of PTX: executions by [CTA rank in the cluster, warp]


class Tally:
    """Recorder of launches that counts how often each warp runs each block of PTX.

    A test of a barrier that fails is not counted, nor are the branches back to it: how often a warp tests depends on
    time, of which the emulator knows nothing.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], collections.Counter[tuple[int, int]]] = {}  # by symbol and block
        self.events: list[Event] = []  # none: the interface of `emulator.timeline.Recorder`
        self.ends: dict[int, float] = {}
        self._spinning: set[tuple[int, int]] = set()  # CTAs (by identity) and warps

    def before(self, batch: WarpBatch) -> None:
        """Records nothing: blocks count when they have run."""

    def start(self, batch: WarpBatch) -> float:
        """Returns a time that nothing is made of."""
        return 0.0

    def after(self, batch: WarpBatch, block: Block, start: float) -> None:
        symbol = batch.cta.grid.program.kernel.name
        counts = self.blocks.setdefault((symbol, block.index), collections.Counter())
        rank = batch.cta.rank
        for warp in map(int, _active(batch, block)):
            place = id(batch.cta), warp
            if batch.spinning:
                self._spinning.add(place)
            elif place not in self._spinning or not _only_branches(block):
                self._spinning.discard(place)
                counts[rank, warp] += 1

    def symbols(self) -> list[str]:
        return list(dict.fromkeys(symbol for symbol, _ in self.blocks))

    def lines(self, text: str, symbol: str, ranks: int, warps: int) -> Lines:
        """Returns the executions of every line of a kernel's PTX `text`."""
        lines: dict[int, Array] = {}
        for block in program(text, symbol).blocks:
            times = np.zeros((ranks, warps))
            for place, count in self.blocks.get((symbol, block.index), {}).items():
                times[place] = count
            lines |= {inst.line: times for inst, _, _ in block.insts}
        return lines


def _active(batch: WarpBatch, block: Block) -> Array:
    """Returns the warps of a batch that have lanes in the block."""
    if batch.pcs is None:
        return batch.warps
    return batch.warps[(batch.pcs == block.index).reshape(-1, 32).any(axis=1)]


def _only_branches(block: Block) -> bool:
    return all(inst.op.startswith("bra") for inst, _, _ in block.insts)


@contextlib.contextmanager
def tally() -> Iterator[Tally]:
    """Counts what emulated launches that record events run meanwhile."""
    counts = Tally()
    with mock.patch.object(machine, "Recorder", return_value=counts):
        yield counts
