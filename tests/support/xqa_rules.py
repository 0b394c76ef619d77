"""Rules of the decode kernel's rings with other bounds, so that small problems follow those of large ones."""

from __future__ import annotations

import dataclasses

import pytest

from cute_attn.kernels.xqa import tiles

TABLES = {**tiles.TABLES, 0: tiles.DEFAULT}


def move_steps(monkeypatch: pytest.MonkeyPatch, **steps: dict[int, int]) -> None:
    """Moves bounds of the ranges in all rules: by field, where a range begins, or ends (the first number beyond)."""
    for field, to in steps.items():
        bounds = {n for table in TABLES.values() for rule in table.rules for n in _bounds(getattr(rule, field))}
        assert to.keys() <= bounds, f"{field} has no step at {to.keys() - bounds}"
    for major, table in TABLES.items():
        moved = table._replace(rules=tuple(_moved(rule, steps) for rule in table.rules))
        if major:
            monkeypatch.setitem(tiles.TABLES, major, moved)
        else:
            monkeypatch.setattr(tiles, "DEFAULT", moved)


def _bounds(numbers: range) -> tuple[int, int]:
    return numbers.start, numbers.stop


def _moved(rule: tiles.Rule, steps: dict[str, dict[int, int]]) -> tiles.Rule:
    changes = {}
    for field, to in steps.items():
        numbers = getattr(rule, field)
        changes[field] = range(to.get(numbers.start, numbers.start), to.get(numbers.stop, numbers.stop))
    return dataclasses.replace(rule, **changes)
