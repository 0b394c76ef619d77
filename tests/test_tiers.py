"""The rule that divides quick tests from long ones."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import EMULATED_CASES, EXCEPTIONS, QUICK_CASES, long_items, runs_on, spread

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Item:
    """What the rule reads of a collected test."""

    nodeid: str
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None


def long_names(items: list[Any]) -> list[str]:
    return [item.nodeid for item in long_items(items)]


def cases(function: str, count: int, *marks: str, on: str = "") -> list[Item]:
    return [Item(f"{function}[{i}-{on}]", marks) for i in range(count)]


@pytest.mark.parametrize(("count", "kept"), [(0, 3), (1, 3), (3, 3), (4, 3), (100, 7), (5, 0)])
def test_spread(count: int, kept: int) -> None:
    found = spread(count, kept)
    assert len(set(found)) == len(found) == min(count, kept)
    assert found == sorted(found)
    assert set(found) <= set(range(count))
    assert not found or found[0] == 0


def test_functions_that_run_kernels_keep_some_cases() -> None:
    for marks in (("emulator",), ("gpu", "sm80")):
        assert long_names(cases("f.py::test_few", QUICK_CASES, *marks)) == []
        assert len(long_names(cases("f.py::test_many", 3 * QUICK_CASES, *marks))) == 2 * QUICK_CASES
    assert long_names(cases("f.py::test_cpu", 3 * QUICK_CASES)) == []


def test_executors_share_the_cases_that_run_kernels() -> None:
    """The first item of a function is often one on the reference, which says nothing of the others."""
    executors = ("reference", ()), ("sm_80", ("emulator",)), ("sm_90a", ("emulator",))
    items = [x for on, marks in executors for x in cases("f.py::test_it", QUICK_CASES, *marks, on=on)]
    items += cases("f.py::test_it", QUICK_CASES, "gpu")
    found = long_names(items)
    assert len(found) == QUICK_CASES
    assert not any("reference" in name for name in found)
    assert any("sm_90a" in name for name in {x.nodeid for x in items if x.marks} - set(found))


def test_exceptions_name_tests() -> None:
    for name, kept in EXCEPTIONS.items():
        file, function = name.split("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert len(long_names(cases(name, 100, "emulator"))) == max(0, 100 - kept)


def test_cases_on_the_emulator(request: pytest.FixtureRequest) -> None:
    """Of this run, which may be the whole suite."""
    assert sum(runs_on(item) == "emulator" for item in request.session.items) <= EMULATED_CASES
