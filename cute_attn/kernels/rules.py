"""Rules of choice: of tiles, rings and backends. Of several, the first that applies decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MOST = 1 << 62  # beyond every length and number


def up_to(most: int) -> range:
    """Return the numbers from 0 to `most`."""
    return range(most + 1)


def above(most: int) -> range:
    """Return the numbers larger than `most`."""
    return range(most + 1, MOST)


@dataclass(frozen=True, eq=False)
class Rule(Generic[T]):
    """A choice, and what it is for. Compared by identity: it is part of keys."""

    value: T
    when: Mapping[str, Collection[Any]]  # values by the name of what is known of a launch
    note: str = ""  # what was measured, and on which GPU

    def __str__(self) -> str:
        """Return the conditions and the note in words."""
        conditions = ", ".join(filter(None, map(_words, self.when, self.when.values()))) or "all other launches"
        return f"{conditions} -- {self.note}" if self.note else conditions

    def covers(self, other: Rule[T], given: Collection[str] = ()) -> bool:
        """Tell whether the rule applies to every launch to which another does, which agree in the names `given`."""
        return all(
            name in other.when and _contains(values, other.when[name])
            for name, values in self.when.items()
            if name not in given
        )


def _words(name: str, values: Collection[Any]) -> str:
    """Return a condition in words."""
    name = name.replace("_", " ")
    if isinstance(values, range):
        least, most = values.start, values.stop - 1
        told = f"from {least}" if values.stop == MOST else f"{least} to {most}" if least else f"up to {most}"
        return f"{name} {most if least == most else told}"
    if True in values or False in values:
        return "" if len(values) == 2 else name if True in values else f"not {name}"
    return f"{name} {' or '.join(str(value) or '16-bit' for value in values)}"


def _contains(values: Collection[Any], others: Collection[Any]) -> bool:
    if isinstance(values, range) and isinstance(others, range):
        return values.start <= others.start and others.stop <= values.stop
    return all(value in values for value in others)


def steps(rules: Iterable[Rule[Any]], name: str) -> list[int]:
    """Return the numbers from which on some rule begins or ceases to apply, in order, and one beyond all: rules tell no
    numbers between two of them apart.
    """
    ranges = [rule.when[name] for rule in rules if name in rule.when]
    return sorted({MOST, *(n for values in ranges if isinstance(values, range) for n in (values.start, values.stop))})


def first(rules: Iterable[Rule[T]], known: Mapping[str, Any]) -> Rule[T]:
    """Return the first rule for a launch of which this is known. None, not known, is among no values."""
    for rule in rules:  # one loop, without calls: plans of decode come here
        for name, values in rule.when.items():
            value = known[name]
            if value is None or value not in values:
                break
        else:
            return rule
    raise LookupError(f"no rule is for {dict(known)}")
