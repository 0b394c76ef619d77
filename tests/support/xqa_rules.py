"""Rules of the decode kernel's rings with other bounds, so that small problems follow those of large ones."""

from __future__ import annotations

import pytest

from cute_attn.kernels.rules import Rule
from cute_attn.kernels.xqa import tiles

RULES = dict(tiles.RULES)


def move_steps(monkeypatch: pytest.MonkeyPatch, **steps: dict[int, int]) -> None:
    """Moves bounds of the ranges in all rules: by field, where a range begins, or ends (the first number beyond)."""
    for field, to in steps.items():
        bounds = {n for rules in RULES.values() for rule in rules for n in _bounds(rule, field)}
        assert to.keys() <= bounds, f"{field} has no step at {to.keys() - bounds}"
    for of, rules in RULES.items():
        monkeypatch.setitem(tiles.RULES, of, tuple(_moved(rule, steps) for rule in rules))


def _bounds(rule: Rule[tiles.Rings], field: str) -> tuple[int, ...]:
    numbers = rule.when.get(field)
    return (numbers.start, numbers.stop) if isinstance(numbers, range) else ()


def _moved(rule: Rule[tiles.Rings], steps: dict[str, dict[int, int]]) -> Rule[tiles.Rings]:
    bounds = {field: _bounds(rule, field) for field in steps}
    changes = {field: range(*(steps[field].get(n, n) for n in ends)) for field, ends in bounds.items() if ends}
    return Rule(rule.value, {**rule.when, **changes})
