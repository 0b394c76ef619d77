"""Markdown tables of records: `python -m perf.report perf/results/*.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

PROGRAMS = ("flash-attn-4", "flashinfer-python")


def markdown(record: Record) -> str:
    """Returns the tables of one record, under a heading that says where and how it was measured."""
    tables = next((made for key, made in TABLES.items() if key in record), speed_tables)(record)
    return "\n\n".join(filter(None, [heading(record), *tables])) + "\n"


def heading(record: Record) -> str:
    env = record["environment"]
    parts = [f"**{env['gpu']}**, {env['date']}, commit {env['commit']}, driver {env['driver']}"]
    parts.append(f"torch {env['torch']} (CUDA {env['cuda']}, cuDNN {env['cudnn']})")
    parts += [f"{name} {env[name]}" for name in PROGRAMS if name in env]
    if "host" in env:
        parts.append(f"host {env['host']}")
    text = "; ".join(parts) + f".\n`{record['command']}`"
    if ceilings := record.get("ceilings"):
        text += (
            f"\nCeilings of the run: read {ceilings['read']:.0f} GB/s, copy {ceilings['copy']:.0f} GB/s, "
            f"bf16 GEMM {ceilings['gemm']:.0f} TFLOP/s."
        )
    return text


OURS, RATES = "cute_attn", {"gb_per_s": "GB/s", "tflops": "TFLOP/s"}
ENGINE_OURS, ENGINE_COLUMNS = "CUTE_ATTN", ("prefill", "decode", "long")  # of vLLM


def cell(entry: Record, key: str, form: str = ".2f") -> str:
    """Returns a number of an entry, or "-" where it has none."""
    return format(entry[key], form) if entry.get(key) is not None else "-"


def speed_tables(record: Record) -> list[str]:
    """Returns one table per unit with one column per candidate, then the reasons why candidates are missing."""
    rows = record["rows"]
    units = dict.fromkeys(row["unit"] for row in rows)
    tables = [_speed_table([row for row in rows if row["unit"] == unit], unit) for unit in units]
    return [*tables, _reasons(rows, record.get("failed_rows", {}))]


def summary_tables(record: Record) -> list[str]:
    """Returns the summary of the sections of `perf.run`, then the tables of their rows."""
    lines = []
    for name, found in record["summary"].items():
        own = [cell(found, key, ".3f") for key in ("mean", "lowest", "auto")]
        lines.append([name, f"{found['compared']} of {found['rows']}", *own, found.get("lowest_row", "-")])
    header = ["section", "compared with peers", "geometric mean", "lowest", "auto to our best, lowest", "lowest row"]
    return [table(header, lines), *speed_tables(record)]


def cold_start_tables(record: Record) -> list[str]:
    """Returns the table of `perf.coldstart`, sizes of installations, and why results are missing."""
    columns = {"import": "import_s", "first prefill": "prefill_s", "first decode": "decode_s"}
    lines = [[name, *(cell(entry, key) for key in columns.values())] for name, entry in record["coldstart"].items()]
    sizes = [f"{name} {entry['bytes'] / 1e6:.0f} MB" for name, entry in record["install"].items() if "bytes" in entry]
    missing = [f"- {name}: {entry['reason']}" for name, entry in record["coldstart"].items() if "reason" in entry]
    tables = [table(["seconds", *columns], lines), f"Installed: {', '.join(sizes)}." if sizes else ""]
    return [part for part in (*tables, "\n".join(missing)) if part]


def _speed_table(rows: Sequence[Record], unit: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name, e in row["candidates"].items() if "speed" in e))
    ours = [name for name in names if name.startswith("cute_attn")]
    header = [f"{unit}", *names, "share of ceiling", "ratio to best peer", "error", "SM MHz"]
    lines = []
    for row in rows:
        entries = row["candidates"]
        best = max((n for n in ours if "speed" in entries.get(n, {})), key=lambda n: entries[n]["speed"], default="")
        speeds, own = [_speed(entries.get(name, {})) for name in names], entries.get(best, {})
        ratio = cell(row, "ratio") + (f" ({row['best_peer']})" if row["ratio"] else "")
        mhz = cell(row, "sm_clock_mhz", "d")
        lines.append([row["name"], *speeds, cell(own, "share"), ratio, cell(own, "error", ".1e"), mhz])
    return table(header, lines)


def _speed(entry: Record) -> str:
    """Returns the median speed and, in brackets, the speeds at the 80th and 20th percentile of the times."""
    if "speed" not in entry:
        return "-"
    slow, fast = (entry["speed"] * entry["median_us"] / entry[p] for p in ("p80_us", "p20_us"))
    return f"{entry['speed']:.1f} ({slow:.1f}-{fast:.1f})"


def _reasons(rows: Sequence[Record], failed_rows: Mapping[str, str]) -> str:
    """Lists missing candidates with their reasons and the number of rows affected, then missing rows."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, entry in row["candidates"].items():
            if "reason" in entry:
                where.setdefault((name, entry["reason"]), []).append(row["name"])
    lines = [f"- {name}: {why} ({len(names)} of {len(rows)} rows)" for (name, why), names in where.items()]
    lines += [f"- {name}: {why}" for name, why in failed_rows.items()]
    return "\n".join(["Not measured:", *lines]) if lines else ""


def overhead_tables(record: Record) -> list[str]:
    """Returns the table of host microseconds per call, and of the parts of our calls."""
    calls = [[name, entry.get("reason") or _host(entry)] for name, entry in record["overhead"].items()]
    return [table(["host µs per call", "median (p20-p80)"], calls)]


def call_tables(record: Record) -> list[str]:
    """Returns the table of `perf.append` or `perf.latent`: microseconds of candidates, ratio to the best peer, rates of
    ours; then why some have none.
    """
    rows = record["append"] if "append" in record else record["latent"]
    rates = [key for key in RATES if any(key in row["candidates"][OURS] for row in rows)]
    lines = []
    for row in rows:
        found, mine = row["candidates"], row["candidates"][OURS]
        peers = [entry["median_us"] for name, entry in found.items() if name != OURS and "median_us" in entry]
        ratio = {"ratio": min(peers) / mine["median_us"]} if peers and "median_us" in mine else {}
        times = (cell(entry, "median_us", ".1f") for entry in found.values())
        lines.append([row["name"], *times, cell(ratio, "ratio"), *(cell(mine, key, ".0f") for key in rates)])
    head = ["us", *rows[0]["candidates"], "to the best peer", *(RATES[key] for key in rates)]
    return [table(head, lines), _reasons(rows, {})]


def transformers_tables(record: Record) -> list[str]:
    """Returns tokens/s per model and shape, then errors of logits, then why results are missing."""
    rows = record["transformers"]
    names = list(dict.fromkeys(name for row in rows for name in (*row["speed"], *row["error"])))
    speeds = [
        [row["name"], key, *(cell(row["speed"].get(name, {}), key, ".0f") for name in names)]
        for row in rows
        for key in dict.fromkeys(key for timed in row["speed"].values() for key in timed)
    ]
    off = [[row["name"], *(cell(row["error"], name, ".1e") for name in names)] for row in rows]
    missing = [f"- {row['name']}, {name}: {why}" for row in rows for name, why in row["reasons"].items()]
    missing += [f"- {name}: {why}" for name, why in record["failed_rows"].items()]
    tables = [table(["model", "tokens/s", *names], speeds), table(["error of logits against fp32", *names], off)]
    return [*tables, "\n".join(missing)]


def distributed_tables(record: Record) -> list[str]:
    """Returns the table of `perf.distributed`: microseconds of each candidate and, in brackets, how many times as fast
    as one GPU it is.
    """
    rows = record["distributed"]
    names = list(dict.fromkeys(name for row in rows for name in row["candidates"]))
    lines = [(row["name"], *(_beside_one_gpu(row["candidates"].get(name, {})) for name in names)) for row in rows]
    return [table((f"us on {record['environment']['gpus']} GPUs", *names), lines)]


def engine_tables(record: Record) -> list[str]:
    """Returns a table per model of `perf.vllm_engine`: the fastest tokens per second of each backend, in each mode."""
    return [_engine_table(rows) for key, rows in record.items() if key.startswith("vllm_engine")]


def _engine_table(rows: Sequence[Record]) -> str:
    best: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        for column in ENGINE_COLUMNS if "decode" in row else ():
            speeds = best.setdefault((row["mode"], column), {})
            speeds[row["backend"]] = max(speeds.get(row["backend"], 0.0), *row[column])
    names = sorted(dict.fromkeys(row["backend"] for row in rows), key=lambda name: name != ENGINE_OURS)
    lines = []
    for (mode, column), speeds in best.items():
        cells = [cell(speeds, name, ",.0f") for name in names]
        fastest = max((speed for name, speed in speeds.items() if name != ENGINE_OURS), default=0.0)
        ratio = f"{speeds[ENGINE_OURS] / fastest:.2f}" if ENGINE_OURS in speeds and fastest else "-"
        lines.append((f"{mode}, {column}", *cells, ratio))
    return table(("tokens/s", *names, f"{ENGINE_OURS} to the best other"), lines)


def _beside_one_gpu(entry: Record) -> str:
    return cell(entry, "median_us", ".1f") + (f" ({entry['speedup']:.2f}x)" if "speedup" in entry else "")


def _host(entry: Record) -> str:
    spread = f" ({entry['p20_us']:.1f}-{entry['p80_us']:.1f})" if "p20_us" in entry else ""  # none of several processes
    return f"{entry['median_us']:.1f}{spread}"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


TABLES: dict[str, Callable[[Record], list[str]]] = {  # by a key that only records of one program have
    "overhead": overhead_tables,
    "append": call_tables,
    "latent": call_tables,
    "transformers": transformers_tables,
    "distributed": distributed_tables,
    "vllm_engine": engine_tables,
    "summary": summary_tables,
    "coldstart": cold_start_tables,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.report", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="JSON files of perf/results")
    records = parser.parse_args(argv).records
    for path in records:
        if not path.is_file():
            parser.error(f"there is no file {path}")
    print("\n".join(markdown(json.loads(path.read_text())) for path in records), end="")


if __name__ == "__main__":
    main()
