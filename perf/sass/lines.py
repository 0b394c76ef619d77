"""SASS by basic blocks, with the line of PTX behind every instruction, and executions carried over from PTX."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cute_attn.emulator.dtypes import Array
from perf.sass.executed import Lines

_LINE = re.compile(r"//## File .*, line (\d+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?([A-Z][\w.]+)\s*(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_PADDING = re.compile(  # at the end of a kernel: an endless loop, then nothing
    r"(\.L_x_\d+):\s*/\*[0-9a-f]+\*/\s+BRA `\(\1\)\s*;(?:\s*/\*[0-9a-f]+\*/\s+NOP\s*;)*"
)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "WARPSYNC.COLLECTIVE")
_CONDITION = re.compile(r"!?U?P\w+,")  # of "BRA.U UP0, `(.L_x_1)"
_MOVES = ("MOV", "IMAD.MOV", "IMAD.U32", "UMOV")


class Instruction(NamedTuple):
    opcode: str  # with its modifiers: "FADD2.FTZ.RM"
    line: int  # of PTX; 0 if the listing names none
    leaves: bool = False  # a jump without a condition: what follows is reached from elsewhere


Block = list[Instruction]


class Attributed(NamedTuple):
    """Opcodes with executions by [CTA rank, warp], and how far the lines agree on them."""

    opcodes: list[tuple[str, Array]]
    agreement: float  # share of the executed instructions whose own line has the count of their block


def blocks(listing: str) -> list[Block]:
    """Returns the basic blocks of a listing of nvdisasm. A label begins one if an instruction names it: others mark
    instructions for tools."""
    targets = set(_TARGET.findall(listing))
    found: list[Block] = [[]]
    line = 0
    for row in _PADDING.sub("", listing).splitlines():
        text = row.strip()
        if label := _LABEL.match(text):
            if label[1] in targets:
                found.append([])
        elif at := _LINE.search(text):
            line = int(at[1])
        elif instruction := _INSTRUCTION.match(text):
            guard, opcode, operands = instruction.groups()
            ends = opcode.startswith(_ENDS)
            leaves = ends and not guard and not _CONDITION.match(operands)
            found[-1].append(Instruction(opcode, line, leaves))
            if ends:
                found.append([])
    return [block for block in found if block]


def without_retries(found: Sequence[Block]) -> list[Block]:
    """Returns the blocks but those that repeat a failed test of a barrier.

    Where ptxas peels the first test of a loop, it moves the others out of line: moves, the test, with a NANOSLEEP where
    PTX gives a time to wait for, and a branch back. All have the lines of the first test, which alone counts. A loop
    that is fallen into is not peeled.
    """
    cold: set[int] = set()
    for i, block in enumerate(found):
        back = i + 1 < len(found) and [inst.opcode for inst in found[i + 1]] == ["BRA"]
        sleeps = any(inst.opcode.startswith("NANOSLEEP") for inst in block)
        if not (sleeps or (back and _only_tests(block))):
            continue
        landing = i - 1 if i > 0 and all(inst.opcode.startswith(_MOVES) for inst in found[i - 1]) else i
        if landing > 0 and found[landing - 1][-1].leaves:
            cold |= {landing, i, *([i + 1] if back else [])}
    return [block for i, block in enumerate(found) if i not in cold]


def _only_tests(block: Block) -> bool:
    return len(block) == 2 and block[0].opcode.startswith("SYNCS.PHASECHK") and block[1].opcode == "BRA"


def attribute(found: Sequence[Block], lines: Lines) -> Attributed:
    """Gives each SASS instruction the executions that most instructions of its block name.

    ptxas moves instructions between blocks of PTX, a block of SASS is entered as a whole: the vote is its count.
    """
    opcodes: list[tuple[str, Array]] = []
    executed = agreeing = 0.0
    for block in found:
        votes = collections.Counter(lines[line].tobytes() for _, line, _ in block if line in lines)
        if not votes:
            continue
        winner = votes.most_common(1)[0][0]
        shape = next(iter(lines.values())).shape
        times = np.frombuffer(winner).reshape(shape)
        if not times.any():
            continue
        opcodes += [(inst.opcode, times) for inst in block]
        total = float(abs(times).sum())
        executed += total * len(block)
        agreeing += total * sum(line in lines and lines[line].tobytes() == winner for _, line, _ in block)
    return Attributed(opcodes, agreeing / executed if executed else 1.0)


def opcodes(found: Sequence[Block]) -> list[str]:
    return [inst.opcode for block in found for inst in block]
