"""The tiers of the test suite: which tests are long, as data. `tests/README.md` has the rule in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

QUICK_CASES = 4  # of a test function that runs on the emulator
ALL = 1 << 20

# Files, or functions in them, of which the quick tier takes more or fewer cases.
EXCEPTIONS: dict[str, int] = {
    "tests/emulator/test_mutations.py": 0,
    "tests/emulator/test_faults.py::test_it_is_noticed": 0,
    "tests/emulator/test_faults.py": ALL,
}


def spread(count: int, kept: int) -> list[int]:
    """`kept` indices at even distances below `count`; all where there are no more."""
    return [i * count // kept for i in range(kept)] if kept < count else list(range(count))


def quick_cases(file: str, function: str, on_emulator: bool) -> int:
    """How many cases of a test function the quick tier runs at most."""
    default = EXCEPTIONS.get(file, QUICK_CASES if on_emulator else ALL)
    return EXCEPTIONS.get(f"{file}::{function}", default)


def long_items(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases beyond those of the quick tier, which are spread evenly over a function's cases on one executor."""
    groups: dict[tuple[str, str, str], list[pytest.Item]] = {}
    for item in items:
        file, _, function = item.nodeid.partition("[")[0].partition("::")
        executor = getattr(getattr(item, "callspec", None), "params", {}).get("executor")
        groups.setdefault((file, function, getattr(executor, "name", "")), []).append(item)
    for (file, function, _), cases in groups.items():
        on_emulator = cases[0].get_closest_marker("emulator") is not None
        quick = spread(len(cases), quick_cases(file, function, on_emulator))
        yield from (case for i, case in enumerate(cases) if i not in set(quick))
