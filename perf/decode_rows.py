"""Candidates for decode rows that are behind their target, timed beside FlashInfer's XQA: `perf.search_decode --rows`.

A candidate is a ring of the decode kernel (`perf.rings.ring`), or one of our backends. Every one is checked against the
reference in fp64, then all of a row and the peer are timed in random order.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.runtime.arch import Arch
from perf import batch_peers, rings
from perf.anchors import UNEVEN
from perf.batch_workloads import BatchWorkload, equal
from perf.bench import OURS, save
from perf.harness import reason
from perf.peers import Bind
from perf.sections import Pace, chosen_binds, seconds_of_round

PEER = "FlashInfer XQA"
TABLE = f"{OURS} table"  # the ring of `cute_attn/kernels/xqa/tiles.py`
HEADS, GROUPED, QWEN, ALONE = (32, 8), (64, 8), (28, 4), (8, 1)

RunRow = Callable[[BatchWorkload, Mapping[str, Bind], int], dict[str, Any]]  # workload, candidates, rounds


class Row(NamedTuple):
    """A workload and what is tried on it. `target`: speed relative to FlashInfer's XQA; `us`: microseconds, or None."""

    workload: BatchWorkload
    rings: tuple[str, ...]
    target: float | None = None
    us: float | None = None
    backends: tuple[str, ...] = ()


# "a512": so many keys of a CTA are fetched into L2 while the preceding launch ends; FlashInfer's kernel loads all tiles
# but the newest. "e": first tiles are copied from where they were before that.
# "w" and "h" below: windows are shorter than any segment that is cut.
WINDOW = (
    "2x2x32x8wa512",
    "2x2x32x8wa512e",
    "4x2x16x4wa512e",
    "4x3x32x2ha512",
    "4x3x32x3ha512",
    "4x4x32x2ha512",
    "4x5x32x2ha512",
    "2x3x32x4ha512",
    "2x4x32x4ha512",
    "2x5x32x4ha512",
    "2x6x32x4ha512",
)
WINDOW_16 = ("4x2x16x4wa512", "4x2x16x4wa512e", "8x2x16x2wa512", "2x3x32x4wa512", "4x3x16x4wa512", "4x3x32x2ha512")
WIDE_WINDOW = (
    "2x2x16x8w",
    "2x2x16x8wa512",
    "4x2x16x4wa512",
    "8x2x16x2wa512",
    "2x3x32x4ha512",
    "2x4x32x3ha512",
    "4x4x32x1ha512",
    "2x2x16x8h",
)
WIDE_WINDOW_16 = (
    "2x3x16x4wa512",
    "4x2x16x3wa512",
    "4x3x16x2wa512",
    "4x3x16x2wa512e",
    "8x2x16x1wa512",
    "2x4x16x3ha512",
    "4x3x16x2ha512",
    "4x6x16x1ha512",
)
# "w": a CTA for every segment, as FlashInfer's grid: prologues and ends of several CTAs overlap, nothing is cut or
# merged.
MANY = ("8x2x32x1", "8x2x32x1a128", "8x2x32x1a256", "2x2x16x8w", "2x2x16x8wa16", "4x3x32x2w")
MANY_16 = ("4x3x16x1", "4x3x16x1a64", "2x3x16x4w", "2x3x16x4wa16", "4x2x16x3w")
# "h": a warp for every segment, so that all heads of a token, which lie side by side, are read at about the same time.
HEADS_8 = ("8x2x16x2h", "8x3x16x2h", "8x4x16x1h", "8x6x16x1h", "4x2x16x4h", "4x3x16x4h", "2x2x16x8h")
HEADS_16 = ("8x2x16x1h", "8x3x16x1h", "4x2x16x3h", "4x3x16x2h", "2x3x16x4h")
FEW = ("8x3x16x1+1", "8x2x32x1", "8x2x32x1a256", "8x2x32x1a512")
FEW_16 = ("8x2x16x1", "8x2x16x1a128", "8x2x16x1a256", "4x3x16x1a256")
# Guests: clusters of the next launch start while those of this one end.
CLUSTERS = (
    "4x3x16x1+1c6",
    "4x3x16x1+1c6a16e",
    "4x3x16x1+1c8a16e",
    "4x3x16x1+1c8a64e",
    "6x2x16x1+1c6a16e",
    "6x2x16x1+1c8a16e",
    "8x2x16x1c6a16e",
    "8x3x16x1c6a16e",
    "8x2x16x1c8a16e",
)
CLUSTERS_8 = ("8x4x16x1c8", "8x3x16x1+1c8", "8x3x16x1+1c8a64", "8x3x16x1+1c8a64e", "8x2x16x1+1c8a128")


def windowed(batch_size: int, kv_dtype: str) -> BatchWorkload:
    """Returns half of the layers of gpt-oss."""
    return equal(batch_size, 1, 8192, GROUPED, 64, 16, kv_dtype=kv_dtype, window_left=127, sinks=True)


def wide(batch_size: int, kv_dtype: str) -> BatchWorkload:
    """Returns a window of as many keys as one CTA processes alone."""
    return equal(batch_size, 1, 8192, HEADS, 128, 16, kv_dtype=kv_dtype, window_left=511, sinks=True)


ROWS = {
    **{f"window-{n}": Row(windowed(n, "e4m3"), WINDOW, 1.2) for n in (64, 8, 16, 32, 128, 256, 512)},
    **{f"window-{n}-16": Row(windowed(n, "bfloat16"), WINDOW_16) for n in (64, 8, 16, 32, 128, 256, 512)},
    **{f"wide-window-{n}": Row(wide(n, "e4m3"), WIDE_WINDOW) for n in (8, 16, 32, 64, 256)},
    **{f"wide-window-{n}-16": Row(wide(n, "bfloat16"), WIDE_WINDOW_16) for n in (8, 32, 256)},
    "e4m3-256x1024": Row(equal(256, 1, 1024, GROUPED, 128, 64, kv_dtype="e4m3"), (*MANY, *HEADS_8), 1.03),
    "e4m3-256x1024h": Row(equal(256, 1, 1024, HEADS, 128, 16, kv_dtype="e4m3"), (*MANY, *HEADS_8), 1.03),
    "e4m3-512x512": Row(equal(512, 1, 512, HEADS, 128, 16, kv_dtype="e4m3"), (*MANY, *HEADS_8), 1.03),
    "e4m3-64x2048": Row(equal(64, 1, 2048, GROUPED, 128, 64, kv_dtype="e4m3"), MANY, 1.1),
    "e4m3-64x8192": Row(equal(64, 1, 8192, GROUPED, 128, 64, kv_dtype="e4m3"), MANY, 1.1),
    "e4m3-8x8192": Row(equal(8, 1, 8192, HEADS, 128, 16, kv_dtype="e4m3"), FEW),
    "e4m3-1x2048": Row(equal(1, 1, 2048, HEADS, 128, 16, kv_dtype="e4m3"), CLUSTERS_8),
    "e4m3-1x4096": Row(equal(1, 1, 4096, HEADS, 128, 16, kv_dtype="e4m3"), CLUSTERS_8),
    "e4m3-1x8192": Row(equal(1, 1, 8192, GROUPED, 128, 64, kv_dtype="e4m3"), CLUSTERS_8),
    "e4m3-1x8192h": Row(equal(1, 1, 8192, HEADS, 128, 16, kv_dtype="e4m3"), CLUSTERS_8),
    "e4m3-1x8192q": Row(equal(1, 1, 8192, QWEN, 128, 16, kv_dtype="e4m3"), CLUSTERS_8),
    "e4m3-1x8192a": Row(equal(1, 1, 8192, ALONE, 128, 16, kv_dtype="e4m3"), CLUSTERS_8),
    "e4m3-1x131072": Row(equal(1, 1, 131072, HEADS, 128, 16, kv_dtype="e4m3"), (*CLUSTERS_8, *FEW)),
    "bf16-uneven": Row(
        BatchWorkload((1,) * len(UNEVEN), UNEVEN, 28, 4, 128, 16),
        ("4x3x16x1", "4x3x16x2", "6x2x16x1+1", "4x2x16x2"),
        backends=("auto", "fa2"),
    ),
    "bf16-512x512": Row(equal(512, 1, 512, HEADS, 128, 16), (*MANY_16, *HEADS_16), backends=("auto", "fa2")),
    "bf16-256x1024": Row(equal(256, 1, 1024, HEADS, 128, 16), (*MANY_16, *HEADS_16), backends=("auto", "fa2")),
    "bf16-64x2048": Row(equal(64, 1, 2048, HEADS, 128, 16), MANY_16, backends=("auto", "fa2")),
    "bf16-8x8192": Row(equal(8, 1, 8192, HEADS, 128, 16), FEW_16, backends=("auto", "fa2")),
    "bf16-1x8192": Row(equal(1, 1, 8192, HEADS, 128, 16), CLUSTERS, backends=("auto",)),
    "bf16-1x8192g": Row(equal(1, 1, 8192, GROUPED, 128, 64), CLUSTERS, backends=("auto",)),
    "bf16-1x8192q": Row(equal(1, 1, 8192, QWEN, 128, 16), CLUSTERS, backends=("auto",)),
    "bf16-1x8192a": Row(equal(1, 1, 8192, ALONE, 128, 16), CLUSTERS, backends=("auto",)),
    "bf16-1x2048": Row(equal(1, 1, 2048, HEADS, 128, 16), CLUSTERS, us=7.0, backends=("auto",)),
    "bf16-1x16384": Row(equal(1, 1, 16384, HEADS, 128, 16), CLUSTERS, backends=("auto",)),
    "bf16-1x131072": Row(equal(1, 1, 131072, HEADS, 128, 16), (*CLUSTERS[:2], *FEW_16), backends=("auto",)),
}


def chosen(names: Sequence[str]) -> dict[str, Row]:
    """Returns the named rows, all for no name."""
    if unknown := [name for name in names if name not in ROWS]:
        raise ValueError(f"--rows must be among {', '.join(ROWS)}, got {' '.join(unknown)}")
    return {name: row for name, row in ROWS.items() if not names or name in names}


def specs_of(row: Row, arch: Arch) -> dict[str, XqaSpec]:
    """Returns the kernels of a row by name, that of the table first, and once; without rings that do not fit an SM."""
    start = rings.start_of(row.workload, arch)
    others = {f"{OURS} {text}": rings.ring(text, start) for text in row.rings}
    found = {name: spec for name, spec in others.items() if spec != start and rings.resident(spec, arch)}
    return {TABLE: start, **found}


def time_row(
    row: Row, arch: Arch, refused: Mapping[XqaSpec, str], rounds: int, run_row: RunRow, backend: str = "xqa"
) -> dict[str, Any]:
    """Returns the record of a row. `refused`: why a kernel is not to be timed, or ""."""
    specs = specs_of(row, arch)
    timed = {name: spec for name, spec in specs.items() if not refused[spec]}
    binds: dict[str, Bind] = {n: functools.partial(rings.bind, spec, backend=backend) for n, spec in timed.items()}
    binds |= {f"{OURS} {name}": functools.partial(batch_peers.ours, name) for name in row.backends}
    binds[PEER] = chosen_binds(row.workload, (), (PEER,))[PEER]  # refuses what `--warm-peers` has not built
    record = run_row(row.workload, binds, rounds)
    for name, spec in specs.items():
        entry = record["candidates"].setdefault(name, {"reason": refused[spec]})
        entry["spec"] = spec.asdict()
    beside(record["candidates"])
    return {**record, "target": row.target, "target_us": row.us}


def beside(entries: Mapping[str, dict[str, Any]]) -> None:
    """Adds the speed of every candidate relative to the peer and to the ring of the table, where these were timed."""
    for key, other in (("ratio", PEER), ("to_table", TABLE)):
        speed = entries.get(other, {}).get("speed")
        for entry in entries.values():
            if speed and "speed" in entry:
                entry[key] = entry["speed"] / speed


def table(name: str, row: Mapping[str, Any]) -> str:
    """Returns the record of a row as text, the fastest candidate first."""
    target = f"target {row['target']}" if row["target"] else f"target {row['target_us']} us" if row["target_us"] else ""
    lines = [f"{name}: {row['name']} {target}"]
    entries = row["candidates"]

    def cell(entry: Mapping[str, Any], key: str) -> str:
        return f"{entry[key]:.3f}" if key in entry else "-"

    for candidate in sorted(entries, key=lambda n: entries[n].get("median_us", math.inf)):
        entry = entries[candidate]
        if "speed" not in entry:
            lines.append(f"  {'-':>8}    {candidate}: {entry['reason']}")
            continue
        cells = f"{entry['share']:.3f} of the ceiling, peer {cell(entry, 'ratio')}, table {cell(entry, 'to_table')}"
        lines.append(f"  {entry['median_us']:8.2f} us {candidate}: {cells}, error {entry['error']:.4f}")
    return "\n".join(lines)


def run(
    selected: Mapping[str, Row],
    arch: Arch,
    rounds: int,
    budget: float | None,
    run_row: RunRow,
    record: dict[str, Any],
    out: Path | None,
) -> None:
    """Compiles all kernels, then measures row after row, at most `rounds` rounds each, while the `budget` (seconds)
    lasts, and prints and saves each."""
    refused = rings.compiled([spec for row in selected.values() for spec in specs_of(row, arch).values()], arch)
    record |= {"rows": {}, "left_out": {}}
    pace = Pace(len(selected), rounds, budget)
    for name, row in selected.items():
        possible, start = pace.next(), time.monotonic()
        if not possible:
            record["left_out"][name] = "the budget was spent"
            print(f"{name}: the budget was spent", file=sys.stderr, flush=True)
            continue
        try:
            found = record["rows"][name] = time_row(row, arch, refused, possible, run_row)
        except Exception as error:  # out of memory, or a broken context: earlier rows stay valid
            record["left_out"][name] = reason(error)
            print(f"{name}: {record['left_out'][name]}", file=sys.stderr, flush=True)
        else:
            print(table(name, found), flush=True)
            pace.finished(time.monotonic() - start, possible, seconds_of_round(found))
        if out:
            save(record, out)
