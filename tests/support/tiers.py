"""The tiers of the test suite: which tests are long, as data. `tests/README.md` has the rule in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

QUICK_CASES = 8  # per test function that runs kernels
ALL = 1 << 20

# Test functions of which the quick tier takes more or fewer cases.
EXCEPTIONS: dict[str, int] = {
    "tests/emulator/test_faults.py::test_it_is_noticed": 0,
    "tests/emulator/test_faults.py::test_there_is_one_place_for_it": ALL,  # reads sources, runs nothing
    "tests/emulator/test_mutations.py::test_mutants_are_caught": 0,
    "tests/test_release.py::test_the_wheel_works_in_an_environment_of_its_own": 0,  # makes an environment: 20 s
    "tests/test_release.py::test_the_wheel_works_with_the_oldest_requirements": 0,
}


def spread(count: int, kept: int) -> list[int]:
    """`kept` indices at even distances below `count`; all where there are no more."""
    return [i * count // kept for i in range(kept)] if kept < count else list(range(count))


def runs_kernels(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("emulator", "gpu"))


def long_items(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases beyond those of the quick tier, which are spread evenly over a function's cases on one executor."""
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        executor = getattr(getattr(item, "callspec", None), "params", {}).get("executor")
        function = item.nodeid.partition("[")[0]
        groups.setdefault((function, getattr(executor, "name", "")), []).append(item)
    for (function, _), cases in groups.items():
        kept = EXCEPTIONS.get(function, QUICK_CASES if runs_kernels(cases[0]) else ALL)
        quick = set(spread(len(cases), kept))
        yield from (case for i, case in enumerate(cases) if i not in quick)
