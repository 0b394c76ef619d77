"""Nine of ten mutated kernels are detected; the survivors compute right results. `mutate` reports on all kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_attn.emulator.program import Program, program
from cute_attn.emulator.ptx import parse
from tests.emulator.equivalents import excuse
from tests.emulator.mutate import ALL_SCHEDULES, PROBLEMS, caught, kernels, report, symbol
from tests.emulator.mutations import applied, mutants
from tests.emulator.patched import like

pytestmark = pytest.mark.emulator

SAMPLE = 11  # of the mutants of a Blackwell kernel: seconds
SAMPLED = [name for name, asked in PROBLEMS.items() if asked.arch == "sm_100a"]
ORDER = ("tensor memory fence removed", "wait for tensor memory stores removed", "commit of products removed")


@pytest.mark.parametrize(("name", "sample"), [("append", None), ("decode", None), *((x, SAMPLE) for x in SAMPLED)])
def test_mutants_are_caught(name: str, sample: int | None) -> None:
    found = report([name], sample)
    print(found)
    assert isinstance(found["caught"], int)
    assert found["caught"] >= 10
    assert isinstance(found["share"], float)
    assert found["share"] >= 0.9, found["survivors"]


@pytest.mark.parametrize("mutation", ORDER)
def test_order_in_tensor_memory_is_needed(mutation: str) -> None:
    (ptx,) = kernels("tcgen05", cases=1)
    mutant = next(found for found in mutants(symbol(ptx), ptx) if found.mutation == mutation and not excuse(ptx, found))
    assert caught("tcgen05", ptx, mutant, ALL_SCHEDULES)


def test_programs_of_mutants() -> None:
    """With the code of another program they are those of their own texts: instructions, and tests of registers."""
    (ptx,) = kernels("tcgen05", cases=1)
    name, found = symbol(ptx), list(mutants(symbol(ptx), ptx))
    for mutation in ("wait for tensor memory loads removed", "mbarrier wait removed", "16 columns off"):
        kernel = parse(applied(next(mutant for mutant in found if mutant.mutation == mutation), ptx))[name]
        assert flat(like(program(ptx, name), kernel)) == flat(Program(kernel))


def flat(found: Program) -> list[tuple[object, ...]]:
    insts = [(inst, form) for block in found.blocks for inst, form, _ in block.insts]
    return [(inst.text, inst.op, inst.operands, form, found.tests.get(id(inst))) for inst, form in insts]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_records(arch: str) -> None:
    """Of all problems of an architecture, at least 95 % of the mutants that break something were caught."""
    record = json.loads(Path(__file__).with_name(f"mutations_{arch}.json").read_text())
    assert record["share"] >= 0.95, record["survivors"]
