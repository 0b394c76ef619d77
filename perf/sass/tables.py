"""Markdown tables of a record of `perf.model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

UNITS = ("MUFU", "FMA2", "FMA", "ALU", "uniform")


def slot_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Returns header and lines of the table of issue slots."""
    lines = [["slots", "polynomial", "softmax", "MMA warp", *UNITS, "rest", "masked", "registers, stack"]]
    for row in rows:
        of_softmax = _of_softmax(row)
        rest = of_softmax["all"] - sum(of_softmax.get(name, 0) for name in UNITS)
        masked = _softmax_cell(row["masked"]) if row.get("masked") else "-"
        cells = [f"{100 * row['polynomial_share']:.2f} %", _softmax_cell(row), _number(_mma(row))]
        cells += [_number(of_softmax.get(name, 0)) for name in UNITS]
        cells += [_number(rest), masked, f"{row['registers']}, {row['stack_bytes']}"]
        lines.append([row["name"], *cells])
    return lines


def clock_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Returns header and lines of the table of clocks."""
    names = list(dict.fromkeys(name for row in rows for name in row["clocks"]))
    lines = [["clocks", *names, "binds", "highest tensor use"]]
    for row in rows:
        found = row["clocks"]
        use = found["tensor"] / max(found[name] for name in (*row["binds"], "tensor"))
        cells = [_number(found.get(name)) for name in names]
        lines.append([row["name"], *cells, " = ".join(row["binds"]), f"{100 * use:.0f} %"])
    return lines


def _of_softmax(row: Row) -> dict[str, float]:
    """Returns the slots of the roles of the softmax together, by unit."""
    found: dict[str, float] = {}
    for role in row["math"]:
        for name, count in row["slots"][role].items():
            found[name] = found.get(name, 0) + count
    return found


def _softmax_cell(row: Row) -> str:
    parts = [row["slots"][role]["all"] for role in row["math"]]
    total = _number(sum(parts))
    return total if len(parts) == 1 else f"{total} ({' + '.join(_number(part) for part in parts)})"


def _mma(row: Row) -> float | None:
    found: Mapping[str, float] | None = row["slots"].get("MMA")
    return None if found is None or "MMA" in row["math"] else found["all"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}".removesuffix(".0")
