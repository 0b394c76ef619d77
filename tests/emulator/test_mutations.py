"""Nine of ten mutated kernels are detected; the survivors compute right results. `mutate` reports on all kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.emulator.equivalents import excuse
from tests.emulator.mutate import ALL_SCHEDULES, PROBLEMS, caught, kernels, reports, symbol
from tests.emulator.mutations import mutants

pytestmark = pytest.mark.emulator

SAMPLE = 11  # of the mutants of a Blackwell kernel: seconds
SAMPLED = [name for name, asked in PROBLEMS.items() if asked.arch == "sm_100a"]
ORDER = ("tensor memory fence removed", "wait for tensor memory stores removed", "commit of products removed")


@pytest.mark.parametrize(("name", "sample"), [("append", None), ("decode", None), *((x, SAMPLE) for x in SAMPLED)])
def test_mutants_are_caught(name: str, sample: int | None) -> None:
    *_, (_, found) = reports([name], sample)
    assert found["caught"] >= 10
    assert found["share"] >= 0.9, found["survivors"]


@pytest.mark.parametrize("mutation", ORDER)
def test_order_in_tensor_memory_is_needed(mutation: str) -> None:
    (ptx,) = kernels("tcgen05", cases=1)
    mutant = next(found for found in mutants(symbol(ptx), ptx) if found.mutation == mutation and not excuse(ptx, found))
    assert caught("tcgen05", ptx, mutant, ALL_SCHEDULES)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_records(arch: str) -> None:
    """Of all problems of an architecture, at least 95 % of the mutants that break something were caught."""
    record = json.loads(Path(__file__).with_name(f"mutations_{arch}.json").read_text())
    assert record["share"] >= 0.95, record["survivors"]
