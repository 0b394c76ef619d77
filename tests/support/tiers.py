"""The tiers of the test suite: which tests are long, as data. `tests/README.md` has the rule in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

QUICK_CASES = 2  # per test function that runs kernels, over all executors
ALL = 1 << 20
GATE_KERNELS = 1_831  # that the compile gate compiles, in both tiers; raise it knowingly
EMULATED_CASES = 2_817  # in both tiers, at most; raise it knowingly: a kernel that no other case has takes 2 s

# Test functions of which the quick tier takes more or fewer cases.
EXCEPTIONS: dict[str, int] = {
    "tests/cli/test_cli.py::test_demo_runs_and_compiles_without_a_gpu": 0,  # `make demo`, in a process of its own: 9 s
    "tests/emulator/test_checks.py::test_waiting_for_a_later_cta": 0,  # 12 s of waiting
    "tests/emulator/test_faults.py::test_it_is_noticed": 0,
    "tests/emulator/test_mutations.py::test_mutants_are_caught": 0,
    "tests/examples/test_examples.py::test_example": 4,  # 2 to 5 s each
    "tests/integrations/test_distributed.py::test_on_ranks": 2,  # processes: up to 9 s
    "tests/kernels/test_compile_gate.py::test_siblings_have_the_same_machine_code": 0,
    "tests/perf/test_vllm_engine.py::test_every_engine_is_measured_or_says_why_not": 0,  # 6 s
    "tests/test_release.py::test_the_wheel_works_in_an_environment_of_its_own": 0,  # makes an environment: 20 s
    "tests/test_release.py::test_the_wheel_works_with_the_oldest_requirements": 0,
}


def spread(count: int, kept: int) -> list[int]:
    """`kept` indices at even distances below `count`, with the first and the last; all where there are no more."""
    kept = min(kept, count)
    return [i * (count - 1) // max(kept - 1, 1) for i in range(kept)]


def runs_on(item: pytest.Item) -> str:
    """The mark of what runs an item's kernels; "" for what runs none, as on the reference."""
    return next((name for name in ("gpu", "emulator") if item.get_closest_marker(name) is not None), "")


def long_items(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases beyond those of the quick tier, which are spread evenly over a function's cases that run kernels."""
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        groups.setdefault((item.nodeid.partition("[")[0], runs_on(item)), []).append(item)
    for (function, where), cases in groups.items():
        kept = EXCEPTIONS.get(function, QUICK_CASES if where else ALL)
        quick = set(spread(len(cases), kept))
        yield from (case for i, case in enumerate(cases) if i not in quick)
