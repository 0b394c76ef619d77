"""Programs of mutants, which share the generated code of all blocks that the mutation leaves alone: most of the time
that a short launch takes is otherwise spent on the program.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cute_attn.emulator import ptx, run
from cute_attn.emulator.isa.registry import lookup
from cute_attn.emulator.program import Block, Program, program
from cute_attn.emulator.ptx import Inst, Kernel

LOADED = ("tcgen05.wait::ld", "tcgen05.ld")  # on which the tests depend of registers before the wait


@contextmanager
def sharing(original: str, changed: str) -> Iterator[None]:
    """Within, launches of `changed`, which differs from `original` in a few instructions, share its program."""
    programs: dict[str, Program] = {}  # of `changed`, by symbol

    def found(text: str, symbol: str) -> Program:
        if text != changed:
            return program(text, symbol)
        if symbol not in programs:
            programs[symbol] = like(program(original, symbol), ptx.parse(text)[symbol])
        return programs[symbol]

    with mock.patch.object(run, "program", found):
        yield


def like(original: Program, kernel: Kernel) -> Program:
    """The program of a kernel that has as many instructions as another one, of which most are the same."""
    old = [inst for inst in original.kernel.body if isinstance(inst, Inst)]
    new = [inst for inst in kernel.body if isinstance(inst, Inst)]
    if len(old) != len(new) or kernel.registers != original.kernel.registers:
        return Program(kernel)
    changed = {id(a): b for a, b in zip(old, new, strict=True) if _meaning(a) != _meaning(b)}
    result = copy.copy(original)
    result.kernel, result.tests = kernel, dict(original.tests)
    result.blocks = list(original.blocks)
    for block in original.blocks:
        if not any(id(inst) in changed for inst, *_ in block.insts):
            continue
        insts = []
        for inst, entry, choices in block.insts:
            following = changed.get(id(inst), inst)
            if following is inst:
                insts.append((inst, entry, choices))
                continue
            if inst.op != following.op and (inst.op.startswith(LOADED) or following.op.startswith(LOADED)):
                return Program(kernel)
            if id(inst) in original.tests:
                result.tests[id(following)] = original.tests[id(inst)]
            insts.append((following, *lookup(following.op, original.arch)))
        solo, converges = (any(getattr(entry, trait) for _, entry, _ in insts) for trait in ("solo", "converges"))
        if (solo and not block.solo) or (converges and not block.converges):
            return Program(kernel)
        result.blocks[block.index] = Block(block.index, insts, solo, converges, block.count)
    return result


def _meaning(inst: Inst) -> tuple[object, ...]:
    return inst.op, inst.operands, inst.guard, inst.negated
