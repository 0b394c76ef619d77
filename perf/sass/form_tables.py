"""Markdown tables of a record of `perf.softmax_forms`: both forms of softmax side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from perf.sass.clocks import BINDING
from perf.sass.score_kinds import REALISTIC

Row = Mapping[str, Any]


def longest(row: Row) -> float:
    """Returns the clocks of the unit that takes longest."""
    return max(float(row["clocks"].get(name, 0)) for name in BINDING)


def form_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Returns header and lines of the table of all rows: clocks of a tile step, and rescales per warp and step."""
    units = ("issue", "MUFU", "FMA", "ALU", "fullest quarter")
    lines = [["tile, scores", "form", *units, "binds", "clocks", "rescales", "moved rows", "error"]]
    for row in rows:
        found = row["clocks"]
        cells = [f"{row['form']} {row['polynomial']}/16", *(_number(found[name]) for name in units)]
        cells += [" = ".join(row["binds"]), _number(longest(row))]
        cells += [f"{row['rescales']:.3f}", f"{row['moved_rows']:.3f}", f"{row['error']:.1e}"]
        lines.append([f"{row['row']} {row['scores']}", *cells])
    return lines


def comparison_lines(rows: Sequence[Row], forms: Sequence[str]) -> list[list[str]]:
    """Returns header and lines of the comparison: issue slots, and clocks of the unit that binds, by form."""
    found: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["row"], row["polynomial"], row["scores"]), {})[row["form"]] = row
    header = ["tile, polynomial, scores"]
    for form in forms:
        header += [f"{form} slots", "clocks"]
    lines = [header]
    for (tile, polynomial, scores), by_form in found.items():
        cells = [f"{tile} {polynomial}/16 {scores}"]
        for form in forms:
            one = by_form.get(form)
            cells += [_number(one["clocks"]["issue"]), _number(longest(one))] if one else ["-", "-"]
        lines.append(cells)
    return lines


def choice_lines(rows: Sequence[Row], forms: Sequence[str]) -> list[list[str]]:
    """Returns header and lines of the table by which a form is chosen: averages over the realistic kinds of scores."""
    found: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        if row["scores"] in REALISTIC:
            found.setdefault((row["row"], row["polynomial"]), {}).setdefault(row["form"], []).append(row)
    lines = [["realistic scores", *(f"{form} {unit}" for form in forms for unit in ("slots", "clocks", "most clocks"))]]
    for (tile, polynomial), by_form in found.items():
        cells = [f"{tile} {polynomial}/16"]
        for form in forms:
            clocks = [longest(row) for row in by_form.get(form, [])]
            slots = [float(row["clocks"]["issue"]) for row in by_form.get(form, [])]
            shown = (fmean(slots), fmean(clocks), max(clocks)) if clocks else ()
            cells += [_number(value) for value in shown] or ["-"] * 3
        lines.append(cells)
    return lines


def kernel_lines(kernels: Sequence[Row]) -> list[list[str]]:
    """Returns header and lines of the table of kernels."""
    found = [[row["name"], str(row["registers"]), str(row["stack_bytes"])] for row in kernels]
    return [["kernel", "registers", "stack bytes"], *found]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
