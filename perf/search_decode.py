"""Proposes rings of the decode kernel by trying them all: `python -m perf.search_decode --kv-dtype e4m3`. GPU only.

Every ring (warps, stages, tokens of a tile, CTAs per SM) that fits shared memory and keeps enough bytes in flight is
compiled; those that need no stack are checked against the reference and timed, workload by workload, in one run with
the peers. The fastest of each workload are then timed again, together and for longer. Rows for
`cute_attn/kernels/xqa/tiles.py` are chosen from the printed tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.programs import program
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.host import grid
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec
from cute_attn.kernels.xqa.tiles import Segments
from cute_attn.runtime import arch as archs
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.artifact import Artifact
from perf import batch_peers, bench
from perf.batch_workloads import BatchInputs, BatchWorkload, equal
from perf.harness import Call, CudaGraphTimer, Timing, measure
from perf.machine import command_line, environment, why_no_gpu
from perf.peers import PEERS, Bind

IN_FLIGHT = (32 << 10, 200 << 10)  # bytes of K and V per SM
WARPS_PER_SM = (4, 16)
SPEC_DTYPES = {"bfloat16": "", "e4m3": "float8_e4m3fn", "nvfp4": "nvfp4"}
LENGTHS = "64x2048,256x1024,64x8192,8x8192"
PEER = "FlashInfer XQA"
GUESTS: dict[Segments, tuple[int, ...]] = {"alone": (0, 1), "one": (0, 1), "few": (0, 1), "many": (0,), "short": (0,)}
CTAS: dict[Segments, tuple[int, ...]] = {
    "alone": (1, 2),
    "one": (1, 2),
    "few": (1, 2),
    "many": (1, 2, 3, 4, 6, 8),
    "short": (2, 3, 4, 6, 8, 16),
}


def rings(start: XqaSpec, segments: Segments, arch: Arch) -> list[XqaSpec]:
    """Lists `start` with every ring that fits an SM of `arch`."""
    grid_of = itertools.product((1, 2, 4, 8), (2, 3, 4, 6), (16, 32, 64), CTAS[segments], GUESTS[segments])
    specs = [
        dataclasses.replace(start, warps=warps, stages=stages, cols=cols, ctas=ctas, guests=guests)
        for warps, stages, cols, ctas, guests in grid_of
    ]
    return [spec for spec in specs if fits(spec, arch)]


def fits(spec: XqaSpec, arch: Arch) -> bool:
    """Tells whether the CTAs of a ring fit an SM together, and keep neither too few nor too many bytes in flight."""
    try:
        memory = XqaMemory.of(spec)
    except ValueError:  # no slot beside those of the outputs
        return False
    resident = spec.ctas + spec.guests
    if resident * (memory.bytes + tiles.RESERVED_SMEM) > arch.smem_limit + tiles.RESERVED_SMEM:
        return False
    in_flight = spec.ctas * spec.warps * memory.prefetch_distance * memory.slot_bytes
    fewest, most = WARPS_PER_SM
    return fewest <= spec.ctas * spec.warps and resident * spec.warps <= most and in_range(in_flight, IN_FLIGHT)


def in_range(value: int, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= value <= bounds[1]


def title(spec: XqaSpec) -> str:
    guests = f"+{spec.guests}" if spec.guests else ""
    return f"{spec.warps}w x {spec.stages}s, {spec.cols} tokens, {spec.ctas}{guests} CTAs"


def compiled(specs: Sequence[XqaSpec], arch: Arch) -> list[XqaSpec]:
    """Returns the specs whose kernels need no stack."""
    made = artifacts.get_many({arch.name: list(specs)}, program)
    return [s for s in specs if isinstance(a := made[arch.name, s], Artifact) and not a.stack_bytes]


@contextlib.contextmanager
def force_spec(spec: XqaSpec) -> Iterator[None]:
    """Makes plans take this kernel; clears the launches remembered before and afterwards."""
    grid.launch_config.cache_clear()
    try:
        with mock.patch.object(tiles, "choose", return_value=spec):
            yield
    finally:
        grid.launch_config.cache_clear()


def bind(spec: XqaSpec, w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    with force_spec(spec):
        return batch_peers.ours("xqa", w, sets)


def segments(w: BatchWorkload) -> Segments:
    """Returns what `variant.segments` says of the workload."""
    if 0 <= w.window_left < tiles.SHORT:
        return "short"
    if len(w.kv_lens) == 1 and w.num_kv_heads <= tiles.ONE[KV_BITS[SPEC_DTYPES[w.kv_dtype]]]:
        return "alone" if w.num_kv_heads == 1 else "one"
    return "few" if len(w.kv_lens) * w.num_kv_heads <= tiles.FEW else "many"


def start_of(w: BatchWorkload, arch: Arch) -> XqaSpec:
    """Returns the kernel of a workload by the table."""
    rows = w.num_qo_heads // w.num_kv_heads
    return tiles.choose(w.dtype, SPEC_DTYPES[w.kv_dtype], w.dtype, w.head_dim, rows, False, segments(w), arch)


def time_all(w: BatchWorkload, specs: Sequence[XqaSpec], peers: bool, rounds: int) -> dict[str, Timing]:
    """Times the kernels, and FlashInfer's XQA with `peers`; leaves out what is wrong or does not run."""
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2_bytes))]
    binds: dict[str, Bind] = {title(spec): functools.partial(bind, spec) for spec in specs}
    if peers:
        binds |= {peer.name: peer.bind for peer in PEERS if peer.name == PEER and w.phase in peer.phases}
    calls, entries = bench.prepare(w, binds, sets)
    for name, entry in entries.items():
        if "reason" in entry:
            print(f"  {name}: {entry['reason']}", file=sys.stderr, flush=True)
    timings = measure(calls, CudaGraphTimer(), rounds).timings
    return {name: found for name, found in timings.items() if not isinstance(found, str)}


def search(w: BatchWorkload, arch: Arch, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the record of a workload: microseconds of every ring, then of the fastest, timed for longer."""
    start = start_of(w, arch)
    specs = {title(s): s for s in compiled(list(dict.fromkeys([start, *rings(start, segments(w), arch)])), arch)}
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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    arch = archs.for_device(torch.cuda.current_device())
    record: dict[str, Any] = {
        "command": command_line("search_decode", sys.argv[1:] if argv is None else argv),
        "environment": environment(),
        "search": [],
    }
    for w in workloads(options):
        record["search"].append(search(w, arch, options))
        if options.out:
            bench.save(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
