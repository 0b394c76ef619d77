"""The emulator takes the instruction forms that ptxas takes, per architecture, and refuses those that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cute_attn.emulator.errors import UnknownForm
from cute_attn.emulator.isa import load, registry
from cute_attn.runtime import dsl
from tests.emulator.micro.blackwell import memory_cases

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


class Row(NamedTuple):
    """A line of PTX, and what stands in brackets above it: the architectures that have it."""

    line: str
    archs: str

    @property
    def opcode(self) -> str:
        return self.line.split()[0].rstrip(";")


def table() -> Iterator[Row]:
    archs = ""
    for line in Path(__file__).with_name("ptxas_table.txt").read_text().splitlines():
        if line.startswith("["):
            archs = line[1:-1]
        elif line and not line.startswith("#"):
            yield Row(re.sub(r"\bR(\d+)\b", vector, line), archs)


def vector(match: re.Match[str]) -> str:
    return "{" + ",".join(f"r{8 + i}" for i in range(int(match[1]))) + "}"


ROWS = [row for row in table() if row.archs != "left out"]
LEFT_OUT = [row.line for row in table() if row.archs == "left out"]


def _refused(lines: list[str], arch: str) -> set[int]:
    """Lines that ptxas refuses. Older ones than CUDA 13's lack conversions that the table has."""
    pytest.importorskip("cutlass.cute", reason="needs the DSL", exc_type=ImportError)
    if dsl.cuda_major(dsl.version() or "") < 13:
        pytest.skip("needs the DSL's ptxas of CUDA 13")
    from tests.support import ptxas

    return ptxas.refused(lines, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_is_what_ptxas_says(arch: str) -> None:
    refused = _refused([row.line for row in ROWS], arch)
    wrong = [row.line for i, row in enumerate(ROWS) if (arch in row.archs) == (i in refused)]
    assert wrong == []


@pytest.mark.parametrize("arch", ARCHS)
def test_the_emulator_agrees(arch: str) -> None:
    load()
    wrong = [row.line for row in ROWS if _known(row.opcode, arch) != (arch in row.archs)]
    assert wrong == []


def _known(opcode: str, arch: str) -> bool:
    try:
        registry.lookup(opcode, int(arch[3:-1]))
    except UnknownForm:
        return False
    return True


def test_what_is_left_out_exists() -> None:
    assert _refused(LEFT_OUT, "sm_100a") == set()
    load()
    for line in LEFT_OUT:
        with pytest.raises(UnknownForm, match="does not know"):
            registry.lookup(line.split()[0], 100)


def test_every_new_form_has_a_micro_kernel() -> None:
    """Tensor memory and conversions apart, which have tests of their own."""
    load()
    used = {form.build for case in memory_cases() for form in _forms_in(case.ptx)}
    others = ("f32x2", "clusterlaunchcontrol", "cvt.rn", "tcgen05")
    for row in ROWS:
        if "sm_100a" in row.archs and "sm_90a" not in row.archs and not any(word in row.line for word in others):
            assert registry.lookup(row.opcode, 100)[0].build in used, row.opcode


def _forms_in(ptx: str) -> Iterator[registry.Form]:
    for word in ptx.split():
        if "." in word and "%" not in word:
            try:
                yield registry.lookup(word, 100)[0]
            except UnknownForm:  # a directive
                continue
