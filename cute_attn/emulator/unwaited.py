"""Registers of tcgen05.ld between the load and tcgen05.wait::ld, in which their values are undefined.

Generated code notes which lanes have not waited, at every instruction that reads or writes a register which a load or
its moves may have written. A mov hands the state on, because compilers tie registers to a wait by moves that may stand
before it; any other use is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import RegisterFault
from cute_attn.emulator.ptx import Inst, Operand, Reg, Vec

if TYPE_CHECKING:
    from cute_attn.emulator.emit import Emitter
    from cute_attn.emulator.warp_batch import WarpBatch

LOAD, WAIT, MOVE = "tcgen05.ld", "tcgen05.wait::ld", "mov"


def tracked(insts: Sequence[Inst]) -> frozenset[int]:
    """The registers that loads write, and those that moves copy them to."""
    found = {register for inst in insts if inst.op.startswith(LOAD) for register in _registers(inst.operands[0])}
    moves = [tuple(map(_registers, inst.operands)) for inst in insts if inst.op.startswith(MOVE)] if found else []
    size = -1
    while size != len(found):
        size = len(found)
        for target, source in moves:
            if not found.isdisjoint(source):
                found |= target
    return frozenset(found)


def _registers(operand: Operand) -> set[int]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    return {item.index for item in items if isinstance(item, Reg)}


def emit(e: Emitter, op: str, own: list[str], reads: frozenset[int], writes: frozenset[int]) -> None:
    """Emit an instruction's own lines, with notes around them of those registers that it reads and writes."""

    def note(function: Callable[..., None], *registers: int) -> None:
        e.call(function, list(map(str, registers)))

    moves = op.startswith(MOVE)
    if reads and not moves:
        note(refuse, *sorted(reads))
    e.lines += own
    if op.startswith(WAIT):
        note(wait)
    elif op.startswith(LOAD):
        note(mark, *sorted(writes))
    elif reads and moves:
        for target in writes:
            note(move, target, *reads)
    elif writes:
        note(overwrite, *sorted(writes))


# --- while a kernel runs ----------------------------------------------------------------------------------------------


def mark(w: WarpBatch, mask: Array | None, *registers: int) -> None:
    """Note a load into these registers."""
    if w.cta.grid.strict:
        active = w.active(mask)
        for register in registers:
            w.unwaited[register] = active | w.unwaited.get(register, np.False_)


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
    overwrite(w, mask, target)
    if held:
        lanes = held[0] if len(held) == 1 else np.any(held, axis=0)
        lanes = lanes if mask is None else (lanes & mask) | w.unwaited.get(target, np.False_)
        if some(lanes):
            w.unwaited[target] = lanes


def refuse(w: WarpBatch, mask: Array | None, *registers: int) -> None:
    """Raise if an active lane has not waited for one of these registers."""
    if not w.unwaited:
        return
    for register in registers:
        lanes = w.unwaited.get(register)
        if lanes is not None and some(lanes & w.active(mask)):
            lane = int((lanes & w.active(mask)).argmax()) % 32
            raise RegisterFault("a register of tcgen05.ld is used before tcgen05.wait::ld", lane)
