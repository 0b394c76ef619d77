"""Registers of tcgen05.ld between the load and tcgen05.wait::ld, in which their values are undefined.

Where one may be used too early is found once per kernel, by following the loads along all paths. Only there, and only
in kernels that have such a place, does the generated code test which lanes have not waited. A mov hands the state on,
because compilers tie registers to a wait by moves that may stand before it; any other use is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.emit import NAMES, Emitter
from cute_attn.emulator.errors import EmulatorError, RegisterFault
from cute_attn.emulator.isa.registry import Form
from cute_attn.emulator.ptx import Addr, Inst, Not, Operand, Pair, Reg, Vec

if TYPE_CHECKING:
    from cute_attn.emulator.program import Block, Program
    from cute_attn.emulator.warp_batch import WarpBatch

Call = tuple[Callable[..., None], tuple[int, ...]]  # a function of this module, and the registers that it is about
LOAD, WAIT, MOVE, OTHER = "tcgen05.ld", "tcgen05.wait::ld", "mov", ""


@dataclass
class _Effect:
    """What an instruction does to registers; sets of registers are bit masks."""

    inst: Inst
    kind: str
    reads: int
    writes: int

    def after(self, unwaited: int) -> int:
        """The registers that may be un-waited after the instruction."""
        if self.kind == LOAD or (self.kind == MOVE and self.reads & unwaited):
            return unwaited | self.writes
        if self.inst.guard is not None:
            return unwaited
        return 0 if self.kind == WAIT else unwaited & ~self.writes


def find(program: Program) -> dict[int, list[Call]]:
    """Calls that the generated code makes at an instruction, by its id: `refuse` before it, the others behind it. A
    kernel that waits for all loads before it uses their registers has none.
    """
    insts = [inst for block in program.blocks for inst, _, _ in block.insts]
    loads = [inst for inst in insts if inst.op.startswith(LOAD)]
    if not loads:
        return {}
    relevant = _closure(loads, [inst for inst in insts if inst.op.startswith(MOVE)])
    effects = [list(_effects(program, block, relevant)) for block in program.blocks]
    entry = _flow(program, effects)
    found: dict[int, list[Call]] = {}
    for at_start, block_effects in zip(entry, effects, strict=True):
        unwaited = at_start
        for effect in block_effects:
            found[id(effect.inst)] = list(_calls(effect, unwaited))
            unwaited = effect.after(unwaited)
    early = any(function is refuse for calls in found.values() for function, _ in calls)
    return {key: calls for key, calls in found.items() if calls} if early else {}


def _calls(effect: _Effect, unwaited: int) -> Iterator[Call]:
    early, stale = effect.reads & unwaited, effect.writes & unwaited
    if effect.kind == WAIT:
        yield wait, ()
    elif effect.kind == MOVE and early:
        yield from ((move, (target, *_only(early))) for target in _only(effect.writes))
    else:
        if early:
            yield refuse, _only(early)
        if effect.kind == LOAD:
            yield mark, _only(effect.writes)
        elif stale:
            yield overwrite, _only(stale)


def _flow(program: Program, effects: list[list[_Effect]]) -> list[int]:
    """The registers that may be un-waited at the start of each block."""
    entry = [0] * len(effects)
    todo = list(range(len(effects)))
    while todo:
        at = todo.pop()
        unwaited = entry[at]
        for effect in effects[at]:
            unwaited = effect.after(unwaited)
        for following in program.successors(program.blocks[at]):
            if unwaited & ~entry[following]:
                entry[following] |= unwaited
                todo.append(following)
    return entry


def _closure(loads: Sequence[Inst], moves: Sequence[Inst]) -> int:
    """The registers that loads write, and those that moves copy them to."""
    found = _registers(*(inst.operands[0] for inst in loads))
    pairs = [(_registers(inst.operands[0]), _registers(inst.operands[1])) for inst in moves]
    size = -1
    while size != found:
        size = found
        for target, source in pairs:
            if source & found:
                found |= target
    return found


def _registers(*operands: Operand) -> int:
    """The registers that operands mention."""
    mask = 0
    for x in operands:
        if isinstance(x, Reg):
            mask |= 1 << x.index
        elif isinstance(x, Vec):
            mask |= _registers(*x.items)
        elif isinstance(x, Pair):
            mask |= _registers(x.first, x.second)
        elif isinstance(x, Addr | Not):
            mask |= _registers(x.base if isinstance(x, Addr) else x.operand)
    return mask


def _only(mask: int) -> tuple[int, ...]:
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return tuple(found)


class _Trace(Emitter):
    """Emitter that notes which registers an instruction reads and writes."""

    reads = writes = 0

    def _register(self, register: Reg, kind: str) -> str:
        self.reads |= 1 << register.index
        return super()._register(register, kind)

    def set(self, operand: Operand, kind: str, expression: str) -> None:
        self.writes |= _registers(operand)
        super().set(operand, kind, expression)


def _effects(program: Program, block: Block, relevant: int) -> Iterator[_Effect]:
    """Effects of a block's instructions on the relevant registers."""
    for inst, entry, choices in block.insts:
        kind = next((k for k in (LOAD, WAIT, MOVE) if inst.op.startswith(k)), OTHER)
        if kind == WAIT:
            yield _Effect(inst, kind, 0, 0)
        elif _registers(*inst.operands) & relevant:
            reads, writes = _trace(program, inst, entry, choices)
            yield _Effect(inst, kind, reads & relevant, writes & relevant)


def _trace(program: Program, inst: Inst, entry: Form, choices: tuple[str, ...]) -> tuple[int, int]:
    trace = _Trace(program.homes, dict(NAMES), {}, masked=False)
    try:
        entry.build(trace, inst, *choices)
    except EmulatorError:  # reported if the instruction is reached
        return 0, 0
    return trace.reads, trace.writes


# --- while a kernel runs ----------------------------------------------------------------------------------------------


def mark(w: WarpBatch, mask: Array | None, *registers: int) -> None:
    """Note a load into these registers."""
    if w.cta.grid.strict:
        for register in registers:
            w.unwaited[register] = w.active(mask) | w.unwaited.get(register, np.False_)


def wait(w: WarpBatch, mask: Array | None) -> None:
    overwrite(w, mask, *w.unwaited)


def overwrite(w: WarpBatch, mask: Array | None, *registers: int) -> None:
    """Note that the active lanes have other values in these registers, or have waited for them."""
    for register in registers:
        lanes = w.unwaited.pop(register, None)
        if lanes is not None and mask is not None and some(lanes & ~mask):
            w.unwaited[register] = lanes & ~mask


def move(w: WarpBatch, mask: Array | None, target: int, *sources: int) -> None:
    """Note that `target` gets a value made of `sources`."""
    held = [w.unwaited[source] for source in sources if source in w.unwaited]
    lanes: Any = np.any(held, axis=0) & w.active(mask) if held else np.False_
    overwrite(w, mask, target)
    if some(lanes):
        w.unwaited[target] = lanes | w.unwaited.get(target, np.False_)


def refuse(w: WarpBatch, mask: Array | None, *registers: int) -> None:
    """Raise if an active lane has not waited for one of these registers."""
    for register in registers:
        lanes = w.unwaited.get(register)
        if lanes is not None and some(lanes & w.active(mask)):
            lane = int((lanes & w.active(mask)).argmax()) % 32
            raise RegisterFault("a register of tcgen05.ld is used before tcgen05.wait::ld", lane)
