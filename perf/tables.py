"""Markdown tables of documents, made from the committed records by `python -m tests.docs.generated`.

A record is found by its name, `DATE_GPU_NAME.json` in `perf/results/`, whose NAME is "anchors", "curves",
"random_rows", "overhead" or "coldstart"; the newest date counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.bench import HOST_LENGTHS, OURS, summary
from perf.report import call_tables, cell, cold_start_tables, table
from perf.rows import RANDOM_NAMES

Record = Mapping[str, Any]
Row = Mapping[str, Any]

RESULTS = Path(__file__).parent / "results"
LOWEST_ROWS, LOWEST_TITLE = 4, "lowest ratios"  # of a phase, in the table of random rows
GPUS = {"h100": "H100", "h200": "H200"}
PEERS = {"flash-attn-4": "FA4", "torch cuDNN": "cuDNN"}  # in documents; the others are FlashInfer's kernels
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "e4m3": "fp8", "nvfp4": "NVFP4"}
README_ROWS = (  # use, name of the row
    ("Prefill, ", "d64 h32/32 ragged b1 q16384 kv16384 causal bfloat16"),
    ("Prefill, ", "d128 h32/8 ragged b4 q4096 kv4096 causal bfloat16"),
    ("Prefill, ", "d128 h32/8 ragged b16 q1024 kv1024 causal bfloat16"),
    ("Prefill, ", "d256 h8/8 ragged b1 q16384 kv16384 full bfloat16"),
    ("Decode, ", "d128 h32/8 page16 b1 q1 kv8192 full bfloat16"),
    ("Decode, ", "d128 h32/8 page16 b64 q1 kv8192 full bfloat16"),
    ("Decode, ", "d128 h32/8 page16 b64 q1 kv8192 full bfloat16 kv-e4m3"),
    ("Decode, ", "d128 h64/8 page64 b256 q1 kv1024 full bfloat16 kv-e4m3"),
)
NONE = "-"
COLUMNS = (OURS, "lengths on the host", "best peer", "ratio")  # ours: "auto", first with lengths on the GPU
FLASHINFER = "FlashInfer fa2"
HOST_PEERS = ("torch flash", "FlashInfer")
FLASHINFER_CALLS = {  # single calls, which the record of host times names otherwise
    "single_prefill_with_kv_cache": "FlashInfer fa2, prefill",
    "single_decode_with_kv_cache": "FlashInfer decode, decode",
}


def find(gpu: str, name: str, results: Path = RESULTS) -> Record | None:
    """Returns the newest record of a name on a GPU ("h100", "h200"), or None."""
    return next(records(gpu, name, results=results), None)


def records(gpu: str, *names: str, results: Path = RESULTS) -> Iterator[Record]:
    """Yields the records of these names on a GPU, the newest first."""
    wanted = [[gpu, name] for name in names]
    for path in sorted(results.glob("*.json"), reverse=True):
        if path.stem.split("_", 2)[1:] in wanted:
            yield json.loads(path.read_text())


def rows(gpu: str, section: str, results: Path = RESULTS) -> tuple[Record, list[Row]] | None:
    """Returns the newest record that has the section's rows on this GPU, and these rows; None if there is none."""
    for record in records(gpu, "anchors", "curves", results=results):
        if own := [row for row in record["rows"] if row["section"] == section]:
            return record, own
    return None


def label(row: Row) -> str:
    """Returns the problem of a row as a reader would say it."""
    w = row["workload"]
    lengths = f"{len(w['qo_lens'])} x {_length(w['qo_lens'], w['kv_lens'])}"
    dims = f"d {w['head_dim']}" + (f"/{w['head_dim_v']}" if w.get("head_dim_v") else "")
    parts = [lengths, f"{w['num_qo_heads']}/{w['num_kv_heads']} heads", dims]
    if max(w["qo_lens"]) > 1:
        parts.append("causal" if w["causal"] else "full")
    if w.get("window_left", -1) >= 0:
        parts.append(f"window {w['window_left'] + 1}")
    if w.get("sinks"):
        parts.append("sinks")
    if w.get("page_size"):
        parts.append(f"page {w['page_size']}")
    return f"{_dtype(w)}, {', '.join(parts)}"


def _dtype(w: Mapping[str, Any]) -> str:
    own, kv = DTYPES[w["dtype"]], DTYPES[w.get("kv_dtype", w["dtype"])]
    return kv if own == kv else f"{own} q, {kv} cache"


def _length(qo_lens: Sequence[int], kv_lens: Sequence[int]) -> str:
    def span(values: Sequence[int]) -> str:
        return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"

    if max(qo_lens) == 1 or list(qo_lens) == list(kv_lens):
        return span(kv_lens)
    return f"{span(qo_lens)} over {span(kv_lens)}"


def latent_table(gpu: str, results: Path = RESULTS) -> str:
    """Returns the table of the newest record of `perf.latent` on a GPU."""
    record = find(gpu, "latent", results)
    return f"{source(record)}.\n\n{call_tables(record)[0]}\n" if record else ""


def source(record: Record) -> str:
    """Returns one line that says on what, when, with which versions and by which command a record was made."""
    env = record["environment"]
    versions = [f"torch {env['torch']}"]
    versions += [f"{p} {env[p]}" for p in ("flash-attn-4", "flashinfer-python") if env.get(p, NONE) not in (NONE, "?")]
    return f"{env['gpu']}, {env['date']}, commit {env['commit']}, {', '.join(versions)}; `{record['command']}`"


def section_table(*sections: str, results: Path = RESULTS) -> str | None:
    """Returns the records of the sections, and their rows on all GPUs side by side; None if there is no record."""
    measured = _measured(sections, results)
    sources = dict.fromkeys(f"{source(record)}.\n" for found in measured.values() for record, _ in found)
    return f"{''.join(sources)}\n{_side_by_side(measured)}\n" if measured else None


def _measured(sections: Sequence[str], results: Path) -> dict[str, list[tuple[Record, list[Row]]]]:
    """Returns the records and rows of sections, by GPU."""
    found = {gpu: [f for section in sections if (f := rows(gpu, section, results))] for gpu in GPUS}
    return {gpu: records for gpu, records in found.items() if records}


def _side_by_side(
    measured: Mapping[str, list[tuple[Record, list[Row]]]], uses: Sequence[tuple[str, str]] | None = None
) -> str:
    """Returns the table of all rows, or of those that have a use: what stands before it, and its name."""
    by_name = {gpu: {row["name"]: row for _, own in records for row in own} for gpu, records in measured.items()}
    every = {name: row for own in by_name.values() for name, row in own.items()}
    lines = []
    for use, name in uses or [("", name) for name in every]:
        if row := every.get(name):
            cells = [cell for own in by_name.values() for cell in _beside_peer(own.get(name))]
            lines.append([f"{use}{label(row)}, {row['unit']}", *cells])
    heads = [f"{GPUS[gpu]}: {what}" for gpu in measured for what in COLUMNS]
    return table(["", *heads], lines)


def random_table(results: Path = RESULTS) -> str | None:
    """Returns each phase's summary and lowest ratios of every GPU's random rows; None without records."""
    tables = [_lowest(record) for gpu in GPUS if (record := find(gpu, "random_rows", results))]
    return "\n".join(tables) or None


def _lowest(record: Record) -> str:
    found, lines = [f"{source(record)}."], []
    for section in RANDOM_NAMES:
        compared = [row for row in record["rows"] if row["section"] == section and row["ratio"]]
        numbers = summary(compared)
        found.append(f"{section}: {len(compared)} rows, geometric mean {numbers['mean']:.2f}.")
        for row in sorted(compared, key=lambda row: float(row["ratio"]))[:LOWEST_ROWS]:
            lines.append([f"{label(row)}, {row['unit']}", *_beside_peer(row)])
    return f"{' '.join(found)}\n\n{table([LOWEST_TITLE, *COLUMNS], lines)}\n"


def host_table(results: Path = RESULTS) -> str | None:
    """Returns the host microseconds per call on every GPU's machine, ours beside FlashInfer's; None without records."""
    found = {gpu: record for gpu in GPUS if (record := find(gpu, "overhead", results))}
    if not found:
        return None
    text = "".join(f"{source(r)}, host {r['environment'].get('host', '?')}.\n" for r in found.values())
    timed = {
        gpu: {name.strip(): cell(e, "median_us", ".1f") for name, e in record["overhead"].items() if "median_us" in e}
        for gpu, record in found.items()
    }
    ours = [name for name in next(iter(timed.values())) if not name.startswith(HOST_PEERS)]
    lines = []
    for name in ours:
        peers = [f"{FLASHINFER}, {name}", FLASHINFER_CALLS.get(name, "")]
        beside = ((own.get(name, NONE), next((own[p] for p in peers if p in own), NONE)) for own in timed.values())
        lines.append([name, *(cell for cells in beside for cell in cells)])
    heads = [f"{GPUS[gpu]}: {what}" for gpu in found for what in (OURS, "FlashInfer")]
    return f"{text}\n{table(['host µs', *heads], lines)}\n"


def cold_start_table(gpu: str, results: Path = RESULTS) -> str | None:
    """Returns the table of `perf.coldstart`: seconds to the first results in fresh processes, install sizes."""
    record = find(gpu, "coldstart", results)
    if record is None:
        return None
    shown = "\n\n".join(cold_start_tables(record))
    return f"{source(record)}, host {record['environment'].get('host', '?')}.\n\n{shown}\n"


def summary_table(results: Path = RESULTS) -> str:
    """Returns the geometric means and lowest ratios to the best peer of both GPUs' anchors."""
    lines = []
    for gpu, title in GPUS.items():
        for section in ("prefill", "decode"):
            numbers = summary(found[1]) if (found := rows(gpu, section, results)) else {}
            if "mean" in numbers:
                means = cell(numbers, "mean"), cell(numbers, "lowest")
                lines.append([f"{title}, {section}", str(numbers["compared"]), *means])
    return table(["to the best peer", "rows", "geometric mean", "lowest"], lines) + "\n"


def readme_table(results: Path = RESULTS) -> str:
    """Returns eight rows: our speed beside the best peer's on every measured GPU."""
    return _side_by_side(_measured(("prefill", "decode"), results), README_ROWS) + "\n"


def _beside_peer(row: Row | None) -> list[str]:
    """Returns a row's `COLUMNS`. Records before 2026-11-26 have lengths on the host alone, and so has their ratio."""
    entries, name = (row["candidates"], row["best_peer"]) if row else ({}, None)
    ours, host = entries.get(OURS, {}), entries.get(HOST_LENGTHS)
    cells = [cell(entry, "speed", ".0f") for entry in ((ours, host) if host else ({}, ours))]
    if not name:
        return [*cells, NONE, NONE]
    peer = entries[name]["speed"]
    return [*cells, f"{peer:.0f} ({PEERS.get(name, name)})", f"{ours['speed'] / peer:.2f}" if "speed" in ours else NONE]
