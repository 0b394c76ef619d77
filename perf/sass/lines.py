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
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)")
_LABEL = re.compile(r"\.L_x_\d+:")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "WARPSYNC.COLLECTIVE")
_MOVES = ("MOV", "IMAD.MOV", "IMAD.U32", "UMOV")


class Instruction(NamedTuple):
    opcode: str  # with its modifiers: "FADD2.FTZ.RM"
    line: int  # of PTX; 0 if the listing names none


Block = list[Instruction]


class Attributed(NamedTuple):
    """Opcodes with executions by [CTA rank, warp], and how far the lines agree on them."""

    opcodes: list[tuple[str, Array]]
    agreement: float  # share of the executed instructions whose own line has the count of their block


def blocks(listing: str) -> list[Block]:
    """Returns the basic blocks of a listing of nvdisasm."""
    found: list[Block] = [[]]
    line = 0
    for row in listing.splitlines():
        text = row.strip()
        if _LABEL.match(text):
            found.append([])
        elif at := _LINE.search(text):
            line = int(at[1])
        elif instruction := _INSTRUCTION.match(text):
            found[-1].append(Instruction(instruction[1], line))
            if instruction[1].startswith(_ENDS):
                found.append([])
    return [block for block in found if block]


def without_retries(found: Sequence[Block]) -> list[Block]:
    """Returns the blocks but those that repeat a failed test of a barrier.

    ptxas peels the first test of a loop and moves the others out of line: moves, the test with a NANOSLEEP, and a
    branch back. All have the lines of the first test, which alone counts.
    """
    cold = {i for i, block in enumerate(found) if any(op.startswith("NANOSLEEP") for op, _ in block)}
    cold |= {i + 1 for i in cold if i + 1 < len(found) and [op for op, _ in found[i + 1]] == ["BRA"]}
    cold |= {i - 1 for i in cold if i > 0 and all(op.startswith(_MOVES) for op, _ in found[i - 1])}
    return [block for i, block in enumerate(found) if i not in cold]


def attribute(found: Sequence[Block], lines: Lines) -> Attributed:
    """Gives each SASS instruction the executions that most instructions of its block name.

    ptxas moves instructions between blocks of PTX, a block of SASS is entered as a whole: the vote is its count.
    """
    opcodes: list[tuple[str, Array]] = []
    executed = agreeing = 0.0
    for block in found:
        votes = collections.Counter(lines[line].tobytes() for _, line in block if line in lines)
        if not votes:
            continue
        winner = votes.most_common(1)[0][0]
        shape = next(iter(lines.values())).shape
        times = np.frombuffer(winner).reshape(shape)
        if not times.any():
            continue
        opcodes += [(op, times) for op, _ in block]
        total = float(abs(times).sum())
        executed += total * len(block)
        agreeing += total * sum(line in lines and lines[line].tobytes() == winner for _, line in block)
    return Attributed(opcodes, agreeing / executed if executed else 1.0)


def opcodes(found: Sequence[Block]) -> list[str]:
    return [op for block in found for op, _ in block]
