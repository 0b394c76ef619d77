"""Proposes rings of the decode kernel by trying them all: `python -m perf.search_decode --kv-dtype e4m3`. GPU only.

Every ring (warps, stages, tokens of a tile, CTAs per SM) that fits shared memory and keeps enough bytes in flight is
compiled; those that need no stack are checked against the reference and timed, workload by workload, in one run with
the peers. The fastest of each workload are then timed again, together and for longer. Rows for
`cute_attn/kernels/xqa/tiles.py` are chosen from the printed tables.

    python -m perf.search_decode --rows --budget 120 --out perf/results/X.json

times instead the candidates of `perf.decode_rows` on the rows that are behind their target (`--rows NAME ...`: on these
alone), beside FlashInfer's XQA, which `--rows --warm-peers` builds before.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.runtime import arch as archs
from cute_attn.runtime.arch import Arch
from perf import bench, decode_rows
from perf.batch_workloads import BatchWorkload, equal
from perf.ceilings import ceilings
from perf.harness import CudaGraphTimer, Timing, measure
from perf.machine import command_line, environment, why_no_gpu
from perf.peers import PEERS, Bind
from perf.rings import SPEC_DTYPES, bind, compiled, resident, start_of, title
from perf.warm import warm

IN_FLIGHT = (32 << 10, 200 << 10)  # bytes of K and V per SM
WARPS_PER_SM = (4, 24)
LENGTHS = "64x2048,256x1024,64x8192,8x8192"
FEW = (1, 2), (0, 1)  # CTAs per SM, and guests, of launches of few pairs of a request and a kv head
MANY = (1, 2, 3, 4, 6, 8), (0,)
SHORT = (2, 3, 4, 6, 8, 12, 16), (0,)  # of windows that one CTA reads alone


def rings(start: XqaSpec, w: BatchWorkload, arch: Arch) -> list[XqaSpec]:
    """List `start` with every ring that fits an SM of `arch`."""
    few = len(w.kv_lens) * w.num_kv_heads <= tiles.FEW
    ctas, guests = SHORT if 0 <= w.window_left < tiles.SHORT else FEW if few else MANY
    specs = [
        dataclasses.replace(start, warps=warps, stages=stages, cols=cols, ctas=ctas, guests=guests)
        for warps, stages, cols, ctas, guests in itertools.product(
            (1, 2, 4, 8), (2, 3, 4, 6), (16, 32, 64), ctas, guests
        )
    ]
    return [spec for spec in specs if fits(spec, arch)]


def fits(spec: XqaSpec, arch: Arch) -> bool:
    """Tells whether the CTAs of a ring fit an SM together, and keep neither too few nor too many bytes in flight."""
    try:
        memory = XqaMemory.of(spec)
    except ValueError:  # no slot beside those of the outputs
        return False
    if not resident(spec, arch):
        return False
    in_flight = spec.ctas * spec.warps * memory.prefetch_distance * memory.slot_bytes
    fewest, most = WARPS_PER_SM
    warps = fewest <= spec.ctas * spec.warps and (spec.ctas + spec.guests) * spec.warps <= most
    return warps and in_range(in_flight, IN_FLIGHT)


def in_range(value: int, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= value <= bounds[1]


def time_all(w: BatchWorkload, specs: Sequence[XqaSpec], peers: bool, rounds: int) -> dict[str, Timing]:
    """Times the kernels, and FlashInfer's XQA with `peers`; leaves out what is wrong or does not run."""
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2_bytes))]
    binds: dict[str, Bind] = {title(spec): functools.partial(bind, spec) for spec in specs}
    if peers:
        binds |= {peer.name: peer.bind for peer in PEERS if peer.name == decode_rows.PEER and w.phase in peer.phases}
    calls, entries = bench.prepare(w, binds, sets)
    for name, entry in entries.items():
        if "reason" in entry:
            print(f"  {name}: {entry['reason']}", file=sys.stderr, flush=True)
    timings = measure(calls, CudaGraphTimer(), rounds).timings
    return {name: found for name, found in timings.items() if not isinstance(found, str)}


def search(w: BatchWorkload, arch: Arch, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of a workload: microseconds of every ring, then of the fastest, timed for longer."""
    start = start_of(w, arch)
    tried = compiled([start, *rings(start, w, arch)], arch)
    specs = {title(spec): spec for spec, refused in tried.items() if not refused}
    first = time_all(w, list(specs.values()), False, 3)
    fastest = sorted(first, key=lambda name: first[name].median_us)[: options.finalists]
    finalists = list(dict.fromkeys([title(start), *fastest]))
    last = time_all(w, [specs[name] for name in finalists], True, options.rounds)
    rates = {name: w.metric.value(t.median_us) for name, t in last.items()}
    print(f"{w.name}: table {title(start)}")
    for name in sorted(rates, key=rates.__getitem__, reverse=True):
        print(f"  {rates[name]:7.1f} GB/s  {name}", flush=True)
    return {
        "name": w.name,
        "table": title(start),
        "tried": {name: timing.median_us for name, timing in first.items()},
        "finalists": {name: timing._asdict() for name, timing in last.items()},
        "speed": rates,
    }


def workloads(options: argparse.Namespace) -> list[BatchWorkload]:
    heads = [tuple(map(int, text.split("/"))) for text in options.heads]
    sizes = [tuple(map(int, text.split("x"))) for text in options.lengths.split(",")]
    return [
        equal(
            b,
            1,
            n,
            (h[0], h[1]),
            options.head_dim,
            options.page_size,
            kv_dtype=options.kv_dtype,
            window_left=options.window_left,
            sinks=options.window_left >= 0,
        )
        for h in heads
        for b, n in sizes
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.search_decode", description=__doc__)
    parser.add_argument("--kv-dtype", choices=SPEC_DTYPES, default="e4m3", help="default: e4m3")
    parser.add_argument("--head-dim", type=int, default=128, help="default: 128")
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query and kv heads (default: 32/8)")
    parser.add_argument("--page-size", type=int, default=16, help="default: 16")
    parser.add_argument("--window-left", type=int, default=-1, help="with sinks (default: no window)")
    parser.add_argument("--lengths", default=LENGTHS, help=f"requests x tokens (default: {LENGTHS})")
    parser.add_argument("--finalists", type=int, default=6, help="rings that are timed for longer (default: 6)")
    parser.add_argument("--rounds", type=int, default=15, help="number of timed rounds of those (default: 15)")
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every workload")
    rows = parser.add_argument_group("rows behind their target")
    rows.add_argument(
        "--rows",
        nargs="*",
        metavar="NAME",
        help=f"times their candidates: {', '.join(decode_rows.ROWS)} (default: all)",
    )
    rows.add_argument("--budget", type=float, help="seconds for all rows, less compilation (default: no limit)")
    rows.add_argument("--warm-peers", action="store_true", help="only builds FlashInfer's XQA for these rows")
    return parser.parse_args(argv)


def time_rows(rows: Mapping[str, decode_rows.Row], options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Measures the ceilings, then the candidates of every row, on the current GPU."""
    device, timer = torch.device("cuda", torch.cuda.current_device()), CudaGraphTimer()
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    record["ceilings"] = ceilings(timer, device)

    def run_row(w: BatchWorkload, binds: Mapping[str, Bind], rounds: int) -> dict[str, Any]:
        return bench.run_row(w, binds, timer, record["ceilings"], device, l2_bytes, rounds)

    arch = archs.for_device(device.index)
    decode_rows.run(rows, arch, options.rounds, options.budget, run_row, record, options.out)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    rows = None
    if options.rows is not None:
        try:
            rows = decode_rows.chosen(options.rows)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    if rows and options.warm_peers:
        warm([row.workload for row in rows.values()], [decode_rows.PEER])
        return 0
    record: dict[str, Any] = {
        "command": command_line("search_decode", sys.argv[1:] if argv is None else argv),
        "environment": environment(),
    }
    if rows:
        time_rows(rows, options, record)
        return 0
    arch = archs.for_device(torch.cuda.current_device())
    record["search"] = []
    for w in workloads(options):
        record["search"].append(search(w, arch, options))
        if options.out:
            bench.save(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
