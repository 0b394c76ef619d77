"""Warp batches: warps that execute together as one vector of lanes, as long as they follow the same path.

Registers are lists of numpy arrays, with one element where all lanes are known to agree and one element per lane
otherwise. Arrays are never changed in place. Where lanes diverge, the lowest block runs first, under a mask. Where
warps diverge and one of them may have to wait, the batch is split for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import Deadlock, Divergence, EmulatorError, FaultLocation, UnknownForm
from cute_attn.emulator.program import EXIT, Block

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

ENDLESS = 1_000_000  # blocks that a batch may run without a wait that succeeds
PATIENCE = 64  # times that one block is chosen under divergence before the other lanes get a turn


class Split(Exception):
    """Request to split the batch into these sets of warps (positions in the batch). A solo form raises it before it
    has any effect."""

    def __init__(self, groups: list[Array]) -> None:
        super().__init__("split")
        self.groups = groups


class Wait:
    """Condition that a batch waits for: that `done` is set, or what `ready` says. `what` is for the deadlock report."""

    def __init__(self, what: str, ready: Callable[[], bool] | None = None) -> None:
        self.what, self.done, self._ready = what, False, ready

    def ready(self) -> bool:
        return self.done if self._ready is None else self._ready()


def span(positions: Array) -> Any:
    """Ascending positions, as a slice where none is left out: what it selects is not copied."""
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first == len(positions) - 1 else positions


class WarpBatch:
    """Warps of one CTA that execute in step."""

    def __init__(self, cta: Cta, warps: Array, registers: list[Any]) -> None:
        self.cta = cta
        self.R = registers  # arrays, or marks of products in flight
        self.pc = 0
        self.pcs: Any = None  # block of each lane, while they differ
        self.wait: Wait | None = None
        self.spinning = ""  # what the last failed test was for
        self.passed = ""  # the barrier whose test succeeded last
        self.spin_since: float | None = None  # virtual time of the first of the tests that failed in a row
        self.turns: dict[int, int] = {}
        self.wgmma_groups: list[list[Any]] = [[]]  # committed groups, oldest first; the last is open
        self.wgmma_fenced: list[Any] = []  # registers at the last wgmma.fence
        self.wgmma_fenced_ids: set[int] | None = None
        self.unwaited: dict[int, Array] = {}  # lanes that have not waited for a tcgen05.ld, by register
        self.before_split: Callable[[WarpBatch], None] | None = None  # finishes work that belongs to all its warps
        self.finished = False
        self._place(warps)

    def _place(self, warps: Array) -> None:
        self.warps = warps
        self.agents = warps + self.cta.first_agent
        self.size = 32 * len(warps)
        self.lane = np.tile(np.arange(32), len(warps))
        self.row = np.repeat(np.arange(len(warps)), 32)  # position in the batch of each lane's warp
        self.lane_agents = self.agents[self.row]
        self._lanes = np.arange(self.size)
        self._lanes.flags.writeable = False
        self.clock_rows = span(self.agents)
        self._special: dict[str, Array] = {}
        self.shuffles: dict[tuple[str, int, int], tuple[Array, Array]] = {}  # by mode and constant operands

    # --- for forms ----------------------------------------------------------------------------------------------------

    def full(self, x: Array) -> Array:
        """Broadcast a register to one element per lane."""
        if x.shape[0] == self.size:
            return x
        return np.ndarray((self.size,), x.dtype, x, strides=(0,))  # broadcast_to takes five times as long

    def active(self, mask: Array | None) -> Array:
        """The mask as an array."""
        return np.ones(self.size, np.bool_) if mask is None else mask

    def lanes(self, mask: Array | None) -> Array:
        """Positions of the active lanes."""
        return self._lanes if mask is None else np.flatnonzero(mask)

    def each(self, mask: Array | None, *registers: Array) -> Iterator[tuple[int, ...]]:
        """Positions of the active lanes, each with its values of integer registers."""
        lanes = self.lanes(mask)
        return zip(lanes.tolist(), *(self.full(x)[lanes].tolist() for x in registers), strict=True)

    def thread(self, lane: int) -> int:
        """Number in the CTA of the thread at a position."""
        return int(self.warps[self.row[lane]]) * 32 + int(self.lane[lane])

    def active_agents(self, mask: Array | None) -> Array:
        """The agents of the warps that have active lanes."""
        return self.agents if mask is None else self.agents[mask.reshape(-1, 32).any(axis=1)]

    def whole(self, mask: Array, what: str) -> None:
        """Check that all 32 lanes of each participating warp are active."""
        rows = mask.reshape(-1, 32)
        partial = rows.any(axis=1) & ~rows.all(axis=1)
        if some(partial):
            raise Divergence(f"{what} with lanes of warp {int(self.warps[partial.argmax()])} missing")

    def first_lanes(self, mask: Array | None) -> Array:
        """The first active lane of each warp that has one."""
        if mask is None:
            return np.arange(0, self.size, 32)
        rows = mask.reshape(-1, 32)
        return np.flatnonzero(rows.any(axis=1)) * 32 + rows.argmax(axis=1)[rows.any(axis=1)]

    def uniform(self, x: Array, mask: Array | None, what: str) -> int:
        """The value that all active lanes share. Warps that disagree split the batch; a warp whose lanes disagree is an
        error."""
        if x.shape[0] == 1:
            return int(x[0])
        lanes = self.lanes(mask)
        values = x[lanes]
        if not some(values != values[0]):
            return int(values[0])
        per_warp = x[self.first_lanes(mask)]
        rows = self.row[self.first_lanes(mask)]
        lookup = np.zeros(len(self.warps), x.dtype)
        lookup[rows] = per_warp
        if (x[lanes] != lookup[self.row[lanes]]).any():
            raise EmulatorError(f"{what} differs within a warp")
        raise Split([rows[per_warp == value] for value in np.unique(per_warp)])

    def special(self, name: str) -> Array:
        found = self._special.get(name)
        if found is None:
            value = self.cta.special(name, self)
            found = self._special[name] = value
        return found

    def begin_op(self, position: int, what: str, generic: bool = False) -> Op:
        """Begin an asynchronous operation of the warp at `position` in the batch."""
        return self.cta.clocks.begin(int(self.agents[position]), f"{what} of warp {self.warps[position]}", generic)

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[None]:
        """Execute until the kernel ends; yield on a wait, on a failed test, and after each slice of blocks."""
        grid = self.cta.grid
        left, busy = grid.slice, 0
        while not self.finished:
            block, mask = self._next()
            self._step(block, mask)
            left, busy = left - 1, busy + 1
            if self.wait is not None:
                yield
                while self.wait is not None:
                    if self.wait.ready():
                        self.wait = None
                    else:
                        yield
                left, busy = grid.slice, 0
            elif self.spinning or left <= 0:
                if busy > ENDLESS:
                    raise Deadlock(f"{busy} blocks without a wait that succeeds: a loop that does not end")
                yield
                left = grid.slice

    def _next(self) -> tuple[Block, Array | None]:
        blocks = self.cta.grid.program.blocks
        if self.pcs is None:
            return blocks[self.pc], None
        pcs = self.pcs
        alive = np.unique(pcs[pcs != EXIT])
        chosen = int(alive[0])
        for candidate in alive:
            if not (blocks[candidate].converges and self._incomplete(pcs == candidate)):
                chosen = int(candidate)
                break
        self.turns[chosen] = self.turns.get(chosen, 0) + 1
        if self.turns[chosen] > PATIENCE and len(alive) > 1:
            others = [int(c) for c in alive if c != chosen]
            self.turns.clear()
            chosen = others[0]
        return blocks[chosen], pcs == chosen

    def _incomplete(self, mask: Array) -> bool:
        """Whether some warp has lanes in `mask` and other lanes that have not arrived yet."""
        here = mask.reshape(-1, 32)
        away = ((self.pcs != EXIT) & ~mask).reshape(-1, 32)
        return bool((here.any(axis=1) & away.any(axis=1)).any())

    def _step(self, block: Block, mask: Array | None) -> None:
        self.spinning = ""
        if mask is not None and block.solo and self._part(mask):
            return
        function = self.cta.grid.program.function(block, mask is not None)
        try:
            following = function(self, self.R, mask)
        except Split as split:
            self._split(split.groups)
            return
        except UnknownForm:
            raise
        except EmulatorError as err:
            self._locate(err)
            raise
        self.cta.grid.count(self, block)
        if self.cta.grid.recorder is not None:
            self.cta.grid.recorder.ran(self, block)
        if mask is None:
            self._follow(following)
        else:
            self._follow_masked(following, mask)

    def _follow(self, following: Any) -> None:
        if type(following) is int:
            self.pc = following
        else:
            taken, yes, no = following
            count = some(taken)
            if count == len(taken):
                self.pc = yes
            elif not count:
                self.pc = no
            else:
                self.pcs = np.where(taken, yes, no)
                self.turns.clear()
                return
        self.finished = self.pc == EXIT

    def _follow_masked(self, following: Any, mask: Array) -> None:
        target = following if type(following) is int else np.where(*following)
        self._place_lanes(np.where(mask, target, self.pcs))

    def _place_lanes(self, pcs: Array) -> None:
        """Note the block of each lane: one for all of them if they are together."""
        self.pcs = pcs
        alive = pcs[pcs != EXIT]
        if len(alive) == 0:
            self.finished = True
        elif len(alive) == len(pcs) and not some(alive != alive[0]):
            self.pc, self.pcs = int(alive[0]), None

    def _part(self, mask: Array) -> bool:
        """Split off the warps that are elsewhere, before a form that may wait. Returns whether it did."""
        here = mask.reshape(-1, 32).any(axis=1)
        alive = (self.pcs != EXIT).reshape(-1, 32).any(axis=1)
        if not some(alive & ~here):
            return False
        self._split([np.flatnonzero(here)])
        return True

    def _split(self, groups: list[Array]) -> None:
        """Keep the first group; every other group becomes a batch of its own."""
        if self.before_split is not None:
            self.before_split(self)
        named = np.concatenate(groups)
        rest = np.setdiff1d(np.arange(len(self.warps)), named)
        everyone = [*groups, rest] if len(rest) else groups
        others = [self._piece(group) for group in everyone[1:]]
        keep = self._piece(everyone[0])
        self.R, self.pc, self.pcs, self.finished = keep.R, keep.pc, keep.pcs, keep.finished
        self.unwaited = keep.unwaited
        self._place(keep.warps)
        self.cta.adopt([batch for batch in others if not batch.finished])

    def _piece(self, rows: Array) -> WarpBatch:
        lanes = span((rows[:, None] * 32 + np.arange(32)).ravel())
        registers = [r if len(r) == 1 else r[lanes] for r in self.R]
        piece = WarpBatch(self.cta, self.warps[rows], registers)
        piece.pc = self.pc
        piece.unwaited = {register: waiting[lanes] for register, waiting in self.unwaited.items()}
        if self.pcs is not None:
            piece._place_lanes(self.pcs[lanes])
        return piece

    def _locate(self, err: EmulatorError) -> None:
        """Record in the error which instruction's generated code raised it."""
        if err.location is not None:
            return
        program = self.cta.grid.program
        trace = err.__traceback__
        while trace is not None:
            inst = program.instruction_at(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            if inst is not None:
                err.location = FaultLocation(
                    program.kernel.name, self.cta.index, tuple(map(int, self.warps)), inst.line, inst.text, inst.source
                )
                return
            trace = trace.tb_next
