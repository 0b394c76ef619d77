"""Markdown tables of a record of `perf.decode_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perf.sass.decode_clocks import UNITS

Row = Mapping[str, Any]
Table = list[list[str]]

OTHERS = tuple(name for name in UNITS if name != "tensor")


def clock_tables(rows: Sequence[Row]) -> list[Table]:
    """Returns a table of clocks per token and kv head for each GPU, header first."""
    gpus = dict.fromkeys(name for row in rows for name in row["on"])
    return [_clocks(gpu, [row for row in rows if gpu in row["on"]]) for gpu in gpus]


def _clocks(gpu: str, rows: Sequence[Row]) -> Table:
    names = [name for name in OTHERS if any(row["clocks"].get(name) for row in rows)]
    found = [[f"{gpu}: clocks", "bytes", "memory", "tensor", *names, "issue share", "largest share", "keeps its limit"]]
    for row in rows:
        on = row["on"][gpu]
        cells = [row["name"], f"{row['bytes']:g}", f"{on['memory']:.2f}", f"{on['tensor']:.2f}"]
        cells += [f"{row['clocks'].get(name, 0):.2f}" for name in names]
        largest = f"{percent(on['share'])} ({on['largest']})"
        found.append([*cells, percent(on["issue_share"]), largest, "yes" if on["holds"] else "no"])
    return found


def slot_lines(rows: Sequence[Row]) -> Table:
    """Returns the table of issue slots of all warps."""
    names = list(dict.fromkeys(name for row in rows for name in row["units"]))
    fixed = ["request and kv head", "CTA"]
    found = [["slots", "token and kv head", *names, *fixed, "registers, stack", "lines agree"]]
    for row in rows:
        cells = [row["name"], *(f"{n:.2f}" for n in (row["slots"], *(row["units"].get(name, 0) for name in names)))]
        cells += [f"{row['fixed'][name]:.0f}" for name in ("segment", "launch")]
        agree = f"{100 * row['checks']['agreement']:.1f} %"
        found.append([*cells, f"{row['registers']}, {row['stack_bytes']}", agree])
    return found


def measured_lines(rows: Sequence[Row]) -> Table:
    """Returns the table of measured launches beside the model: issue's share of memory's clocks by the model alone, and
    how much of the measured clocks each unit works."""
    found = [["measured", "us", "SM MHz", "share of read ceiling", "model: issue / memory", "allows", *UNITS[:-1]]]
    found[0].append("fixed issue")
    for row in rows:
        cells = [row["name"], f"{row['microseconds']:.1f}", str(row["clock_mhz"]), percent(row["read_share"])]
        cells += [percent(row["shares"]["issue"] / row["read_share"])]
        cells += [f"{percent(row['bound'])} ({row['largest'] if row['bound'] < 1 else 'memory'})"]
        cells += [percent(row["shares"].get(name, 0)) for name in UNITS[:-1]]
        found.append([*cells, percent(row["fixed"])])
    return found


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
