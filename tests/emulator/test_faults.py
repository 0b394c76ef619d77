"""Tests detect faults injected into the kernels' sources. `inject` tries all of them."""

from __future__ import annotations

import functools
import operator
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


def test_words_choose_tests() -> None:
    """Else `inject` ends at a fault: ids of cases change with the cases."""
    files = sorted({fault.tests[0] for fault in FAULTS})
    lines = inject.run(inject.ROOT, ("--collect-only", "-n", "0", *files)).stdout.splitlines()

    def some(file: str, option: str = "-k", words: str = "test") -> bool:
        chosen, names = Expression.compile(words), [x.lower() for x in lines if x.startswith(f"{file}::")]
        return any(chosen.evaluate(functools.partial(operator.contains, name)) for name in names)

    assert {fault.tests for fault in FAULTS if not some(*fault.tests)} == set()


def test_descriptions_are_not_repeated() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with inject.copy() as found:
        yield found


@pytest.mark.emulator
@pytest.mark.parametrize("what", TRIED)
def test_it_is_noticed(what: str, root: Path) -> None:
    assert not inject.survives(next(fault for fault in FAULTS if fault.what == what), root)
