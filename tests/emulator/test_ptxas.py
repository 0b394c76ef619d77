"""The emulator takes the instruction forms that ptxas takes, per architecture, and refuses those that it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_attn.emulator.errors import UnknownForm
from cute_attn.emulator.isa import load, registry
from cute_attn.runtime import dsl
from tests.emulator.micro.blackwell import memory_cases
from tests.emulator.ptxas_table import ARCHS, LEFT_OUT, rows

ROWS = rows()


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
    used = {form.build for known in memory_cases() for form in _forms_in(known.case.ptx)}
    older = ("f32x2", "clusterlaunchcontrol", "cvt.rn", "tcgen05")
    for row in ROWS:
        if "sm_100a" in row.archs and "sm_90a" not in row.archs and not any(word in row.line for word in older):
            assert registry.lookup(row.opcode, 100)[0].build in used, row.opcode


def _forms_in(ptx: str) -> Iterator[registry.Form]:
    for word in ptx.split():
        if "." in word and "%" not in word:
            try:
                yield registry.lookup(word, 100)[0]
            except UnknownForm:  # a directive
                continue
