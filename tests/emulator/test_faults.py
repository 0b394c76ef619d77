"""Tests detect faults injected into the kernels' sources. `inject` tries all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.emulator import inject
from tests.emulator.faults import FAULTS

TRIED = ("the result of the vote is always 0", "gathered rows are not fenced", "a CTA's two partials share one index")


def test_there_is_one_place_for_each() -> None:
    kernels = inject.ROOT / inject.KERNELS
    assert [fault.what for fault in FAULTS if (kernels / fault.file).read_text().count(fault.old) != 1] == []
    assert [fault.what for fault in FAULTS if not (inject.ROOT / fault.tests[0]).is_file()] == []
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_its_tests_exist() -> None:
    """`-k` chooses some of them."""
    files = sorted({fault.tests[0] for fault in FAULTS})
    found = inject.run(inject.ROOT, (*files, "--collect-only")).stdout.lower().splitlines()

    def chosen(file: str, *words: str) -> bool:
        expression = Expression.compile(words[-1] if words else "test")
        of_file = (line for line in found if line.startswith(file))
        return any(expression.evaluate(lambda word, line=line: word.lower() in line) for line in of_file)

    assert {fault.tests for fault in FAULTS if not chosen(*fault.tests)} == set()


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with inject.copy() as found:
        yield found


@pytest.mark.emulator
@pytest.mark.parametrize("what", TRIED)
def test_it_is_noticed(what: str, root: Path) -> None:
    assert not inject.survives(next(fault for fault in FAULTS if fault.what == what), root)
