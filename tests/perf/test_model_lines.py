"""Executions of PTX lines and their way to SASS, on a small kernel whose listing is kept beside it.

`data/two_roles.sass` is what ptxas 13.4 (`-arch=sm_100a -O3 -lineinfo`) and nvdisasm 13.5 (`-c -gp`) make of
`data/two_roles.ptx`: `perf.sass.tools.Tools.listing`.
"""

from __future__ import annotations

import collections
import struct
from pathlib import Path

import numpy as np
import pytest

from cute_attn.emulator import GlobalMemory, Schedule, launch
from perf.sass import lines
from perf.sass.executed import Tally, tally
from perf.sass.lines import Instruction

DATA = Path(__file__).parent / "data"
PTX, LISTING = ((DATA / f"two_roles.{kind}").read_text() for kind in ("ptx", "sass"))
EVERY = [Schedule(), Schedule("delayed", 1), Schedule("adversarial", 2)]

PEELED = """
    //## File ".nv_debug_ptx_txt", line 10
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3 ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_3:
    //## File ".nv_debug_ptx_txt", line 11
        /*0020*/                   FADD2.FTZ.RM R2, R2.F32x2.HI_LO, R4 ;
.L_x_9:
        /*0030*/                   BRA.U UP0, `(.L_x_3) ;
        /*0040*/                   EXIT ;
.L_x_1:
    //## File ".nv_debug_ptx_txt", line 10
        /*0050*/                   MOV R0, UR8 ;
.L_x_2:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0+URZ], R3 ;
        /*0070*/              @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*0080*/              @!P0 BRA `(.L_x_2) ;
        /*0090*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*00a0*/                   BRA `(.L_x_4);
        /*00b0*/                   NOP;
"""


def _run(turns: int, schedule: Schedule) -> Tally:
    memory, out = GlobalMemory(), np.zeros(32, np.float32)
    memory.add("out", 1 << 40, out.nbytes, writable=True, valid=False, data=out.view(np.uint8))
    description = {"symbol": "two_roles", "grid": (1, 1, 1), "block": (64, 1, 1), "smem_bytes": 0}
    description["params"] = struct.pack("<QI", 1 << 40, turns)
    with tally() as counts:
        launch(PTX, description, memory, events=True, schedule=schedule)
    exact = sum(2.0 ** (np.arange(32) - turn) for turn in range(1, turns + 1))
    np.testing.assert_allclose(out, exact, rtol=1e-5)
    return counts


def _line(text: str) -> int:
    (found,) = (number for number, row in enumerate(PTX.splitlines(), 1) if text in row)
    return found


@pytest.mark.parametrize("schedule", EVERY, ids=lambda s: s.kind)
def test_executions_of_lines_do_not_depend_on_the_order(schedule: Schedule) -> None:
    counts = _run(24, schedule).lines(PTX, "two_roles", 1, 2)
    expected = {
        "bar.sync": (1, 1),
        "mbarrier.arrive.shared::cta.b64 %rd2": (0, 24),
        "try_wait.parity.shared::cta.b64 %p4": (0, 24),  # however often the test fails
        "try_wait.parity.shared::cta.b64 %p6": (24, 0),
        "ex2.approx": (24, 0),
        "setp.ne.u32 %p7": (24, 0),
        "mul.wide": (1, 0),
    }
    assert {text: tuple(counts[_line(text)][0]) for text in expected} == expected
    roots = [number for number, row in enumerate(PTX.splitlines(), 1) if "sqrt" in row]
    assert len(roots) == 12
    assert all(tuple(counts[line][0]) == (3, 0) for line in roots)


def test_a_tally_ends_with_its_block() -> None:
    counts = _run(8, Schedule())
    before = counts.lines(PTX, "two_roles", 1, 2)[_line("ex2.approx")]
    _run(8, Schedule())
    assert (counts.lines(PTX, "two_roles", 1, 2)[_line("ex2.approx")] == before).all()


def test_sass_of_a_turn() -> None:
    """Counted by hand in the listing: the two loops, less the roots of seven turns in eight."""
    short, long = (_run(turns, Schedule()).lines(PTX, "two_roles", 1, 2) for turns in (8, 24))
    per_turn = {line: (long[line] - short[line]) / 16 for line in long}
    found = lines.attribute(lines.without_retries(lines.blocks(LISTING)), per_turn)
    ops: dict[tuple[int, str], float] = collections.defaultdict(float)
    for op, times in found.opcodes:
        for warp in (0, 1):
            ops[warp, op.partition(".")[0]] += times[0, warp]
    of_sum = {"LOP3": 2, "SHF": 1, "IMAD": 1, "SYNCS": 3, "NANOSLEEP": 1, "BRA": 3, "FADD": 2, "MUFU": 1 + 12 / 8}
    of_sum |= {"LDCU": 1, "VIADD": 1, "ISETP": 1}
    of_turns = {"SYNCS": 2, "LDCU": 1, "LOP3": 1, "VIADD": 1, "SHF": 1, "ISETP": 1, "BRA": 2}
    assert {op: n for (warp, op), n in ops.items() if warp == 0 and n} == of_sum
    assert {op: n for (warp, op), n in ops.items() if warp == 1 and n} == of_turns
    assert 0.9 < found.agreement < 1  # lines without a marker of their own have another's


def test_blocks_of_a_listing() -> None:
    found = lines.blocks(PEELED)
    assert found[0] == [Instruction("SYNCS.PHASECHK.TRANS64.TRYWAIT", 10), Instruction("BRA", 10)]
    assert found[1] == [Instruction("FADD2.FTZ.RM", 11), Instruction("BRA.U", 11)]  # no instruction names .L_x_9
    assert found[2] == [Instruction("EXIT", 11, True)]
    assert len(found) == 6  # without the padding


def test_retries_of_a_peeled_test_are_left_out() -> None:
    found = lines.blocks(PEELED)
    assert lines.without_retries(found) == found[:3]
    without_a_time = lines.blocks("\n".join(row for row in PEELED.splitlines() if "NANOSLEEP" not in row))
    assert lines.without_retries(without_a_time) == without_a_time[:3]
    assert lines.without_retries(lines.blocks(LISTING)) == lines.blocks(LISTING)  # fallen into: the test itself


def test_a_block_has_the_count_that_most_of_its_instructions_name() -> None:
    once, often = np.array([[1.0]]), np.array([[5.0]])
    block = [Instruction("FADD", 1), Instruction("FMUL", 2), Instruction("FFMA", 2), Instruction("MOV", 99)]
    found = lines.attribute([block, [Instruction("EXIT", 3)]], {1: once, 2: often, 3: np.array([[0.0]])})
    assert [(op, times.item()) for op, times in found.opcodes] == [("FADD", 5), ("FMUL", 5), ("FFMA", 5), ("MOV", 5)]
    assert found.agreement == 0.5
