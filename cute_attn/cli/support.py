"""`support`: prints what each backend supports, as selection answers it.

A group of rows divides samples of problems between its rows, so that rows are disjoint; a cell is what selection says
about every sample of its row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_attn.runtime import arch as archs

if TYPE_CHECKING:
    from cute_attn.cli.support_rows import Division
    from cute_attn.dispatch.capabilities import Backend
    from cute_attn.problem import Features

ORDER = ("fa4", "fa3", "xqa", "fa2", "reference")


class Cell(NamedTuple):
    """A verdict: "yes", "no" with the reason, or "-" if the backend does not run on the GPUs of the row."""

    verdict: str
    reason: str = ""


Rows = dict[str, dict[str, Cell]]  # by feature and backend; they exclude each other


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "support",
        help="print what each backend supports, as Markdown",
        description="Prints one table per group of problems. Rows of a table exclude each other.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")


def run(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(document(), indent=1))
    else:
        print(markdown(), end="")
    return 0


def groups() -> dict[str, Rows]:
    """Returns all tables by title. ValueError: a backend supports some samples of a row, and refuses others."""
    from cute_attn.cli.support_rows import DIVISIONS

    return {division.title: rows_of(division) for division in DIVISIONS}


def rows_of(division: Division) -> Rows:
    """Asks every backend about every sample."""
    from cute_attn.cli.support_rows import OTHERS
    from cute_attn.dispatch.capabilities import BY_NAME

    rows: dict[str, dict[str, set[Cell]]] = {}
    for sample in division.samples:
        cells = rows.setdefault(sample.row, {name: set() for name in ORDER})
        for name in ORDER:
            asked = sample.features
            if name == "xqa" and division.decode:
                asked = asked._replace(decode=True)
            for arch in map(archs.named, division.archs.get(name, sample.archs)):
                cells[name].add(_ask(BY_NAME[name], asked, arch))
    agreed = {label: _agreed(label, cells) for label, cells in rows.items()}

    def order(label: str) -> tuple[bool, int]:  # "all others" behind what they are others than
        return label == OTHERS, -sum(cell.verdict == "yes" for cell in agreed[label].values())

    return {label: agreed[label] for label in sorted(agreed, key=order)}


def _ask(backend: Backend, features: Features, arch: archs.Arch) -> Cell:
    from cute_attn.dispatch import select

    if not backend.runs(arch):
        return Cell("-")
    refusals = select.reasons_against(backend, features, arch)
    return Cell("no", f"{refusals[0][2]}; instead: {refusals[0][3]}") if refusals else Cell("yes")


def _agreed(label: str, cells: dict[str, set[Cell]]) -> dict[str, Cell]:
    agreed = {}
    for name, found in cells.items():
        ran = found - {Cell("-")}
        if len({cell.verdict for cell in ran}) > 1:
            raise ValueError(f"row {label!r} is too coarse: {name} supports some of its problems and refuses others")
        reasons = sorted({cell.reason for cell in ran})
        agreed[name] = Cell(min(ran).verdict, ". Or: ".join(reasons)) if ran else Cell("-")
    return agreed


def markdown() -> str:
    """Returns one table per group, and the reasons of all refusals."""
    from cute_attn.dispatch.capabilities import BY_NAME

    shown = groups()
    notes: dict[str, list[str]] = {}  # backends by reason
    for name, cell in (item for rows in shown.values() for cells in rows.values() for item in cells.items()):
        if cell.reason and name not in notes.setdefault(cell.reason, []):
            notes[cell.reason].append(name)
    number = {reason: index for index, reason in enumerate(notes, 1)}
    lines = [
        "Written by `python -m cute_attn support`, which asks the selection of backends. Rows of a table exclude each",
        "other: find your problem in every table; a backend takes it if no table says no. A dash: it does not run on",
        "such GPUs. Numbers refer to the [reasons](#reasons).",
        "",
        *(f"- `{name}`: {BY_NAME[name].runs_on}" for name in ORDER),
        "",
    ]
    for title, rows in shown.items():
        lines += [f"### {title}", "", *_table(rows, number), ""]
    lines += ["### Latent attention (MLA)", "", *_latent_table(), ""]
    listed = {reason: ", ".join(f"`{name}`" for name in names) for reason, names in notes.items()}
    reasons = (f"{number[reason]}. {names}: {reason}" for reason, names in listed.items())
    return "\n".join([*lines, "### Reasons", "", *reasons]) + "\n"


def _table(rows: Rows, number: Mapping[str, int]) -> list[str]:
    lines = ["| | " + " | ".join(f"`{name}`" for name in ORDER) + " |", "|---" + "|:---:" * len(ORDER) + "|"]
    for feature, cells in rows.items():
        shown = (cell.verdict + (f" ({number[cell.reason]})" if cell.reason else "") for cell in cells.values())
        lines.append(f"| {feature} | " + " | ".join(shown) + " |")
    return lines


def latent() -> dict[str, dict[str, str]]:
    """Return the kernel for each form of a latent cache, by architecture."""
    from cute_attn.cli.support_rows import LATENT_FORMS
    from cute_attn.kernels.mla.tiles import choose

    return {
        label: {name: choose("bfloat16", form, 1, arch).instructions for name, arch in archs.ARCHS.items()}
        for label, form in LATENT_FORMS.items()
    }


def _latent_table() -> list[str]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for label, kernels in latent().items():
        rows.setdefault(tuple(kernels.values()), []).append(label)
    lines = ["| rows of the cache | " + " | ".join(archs.ARCHS) + " |", "|---" + "|:---:" * len(archs.ARCHS) + "|"]
    return [*lines, *(f"| {'; '.join(labels)} | " + " | ".join(cells) + " |" for cells, labels in rows.items())]


def document() -> list[dict[str, Any]]:
    """Returns the tables as data."""
    return [
        {
            "title": title,
            "rows": [
                {"feature": feature, "backends": {name: cell._asdict() for name, cell in cells.items()}}
                for feature, cells in rows.items()
            ],
        }
        for title, rows in groups().items()
    ] + [
        {
            "title": "Latent attention (MLA)",
            "rows": [{"feature": label, "kernels": kernels} for label, kernels in latent().items()],
        }
    ]
