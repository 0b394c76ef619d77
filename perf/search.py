"""Proposes rows of fa3's tile table by hill climbing: `python -m perf.search --head-dim 128 --heads 16/16`. GPU only.

For every workload the search starts from the tile in the table. Tiles that differ in one field are compiled; those with
stack or too much shared memory are dropped, the others are checked and timed together with the best so far. The winners
of all workloads are then timed on every workload, and the best one overall is the row for
`cute_attn/kernels/fa3/tiles.py`. With `--rows`, the tiles of `perf/tile_trials.py` are timed on its rows instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from cute_attn.kernels.blocks.tiles import TileProblem
from cute_attn.kernels.fa3 import tiles as fa3_tiles
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts
from cute_attn.runtime.artifact import Artifact
from perf import batch_peers, bench, tile_trials
from perf.batch_workloads import BatchInputs, BatchWorkload, equal
from perf.harness import Call, CudaGraphTimer, measure
from perf.machine import why_no_gpu
from perf.tile_trials import SMEM_LIMIT, Trial, force

# Registers per thread for accumulators and probabilities, by number of MMA warpgroups.
REGISTERS = {2: 212, 3: 132}
MIN_GAIN = 1.004  # less is noise
LENGTHS = "1x16384,4x4096,16x1024"

Rates = Mapping[HopperTile, float]  # TFLOP/s of the tiles that work


def fits(head_dim: int, tile: HopperTile) -> bool:
    """Tells whether a tile fits shared memory, and S, P, O and q, where it is there, the registers."""
    registers = tile.cols // 2 + tile.cols // 4 + head_dim // 2 + min(head_dim, tile.q_registers) // 4
    return HopperMemory(tile, head_dim, head_dim).bytes <= SMEM_LIMIT and registers <= REGISTERS[tile.mma_warpgroups]


def neighbours(head_dim: int, tile: HopperTile) -> list[HopperTile]:
    """Returns the tiles that differ in one field and fit."""
    steps = -(-head_dim // 16)  # of the sum of a score
    changes: list[dict[str, int | bool]] = [
        {"rows": 320 - tile.rows},
        *({"cols": tile.cols + step} for step in (-32, -16, 16, 32) if 0 < tile.cols + step <= 256),
        *({"stages": tile.stages + step} for step in (-1, 1) if tile.stages + step >= 2),
        {"q_stages": 3 - tile.q_stages},
        {"ping_pong": not tile.ping_pong},
        *({"q_registers": share * steps // 2 * 16} for share in (0, 1, 2)),
    ]
    tiles = [dataclasses.replace(tile, **change) for change in changes]  # type: ignore[arg-type]
    return [found for found in dict.fromkeys(tiles) if found != tile and fits(head_dim, found)]


def climb(
    start: HopperTile,
    around: Callable[[HopperTile], Sequence[HopperTile]],
    rate: Callable[[Sequence[HopperTile]], Rates],
    in_time: Callable[[], bool] = lambda: True,
) -> tuple[HopperTile, float]:
    """Steps to the best neighbour while that is faster; returns the last tile and its speed relative to `start`.

    `rate` times tiles together: only speeds from the same call are compared. A step begins only while `in_time`.
    """
    best, gain, tried = start, 1.0, {start}
    while in_time():
        new = [tile for tile in around(best) if tile not in tried]
        rates = rate([best, *new])
        tried.update(new)
        top = max(rates, key=rates.__getitem__, default=best)
        if best not in rates or rates[top] < MIN_GAIN * rates[best]:
            return best, gain
        best, gain = top, gain * rates[top] / rates[best]
    return best, gain


def proposal(rates: Mapping[str, Rates]) -> HopperTile:
    """Returns the tile with the largest product of speeds, among those that work for all workloads."""
    tiles = set.intersection(*(set(by_tile) for by_tile in rates.values()))
    return max(tiles, key=lambda tile: math.prod(by_tile[tile] for by_tile in rates.values()))


def bind(tile: HopperTile, w: BatchWorkload, sets: Sequence[BatchInputs]) -> list[Call]:
    with force(Trial(tile)):
        return batch_peers.ours("fa3", w, sets)


def compile_tiles(head_dim: int, tiles: Sequence[HopperTile]) -> list[HopperTile]:
    """Returns the tiles whose kernels need no stack and fit shared memory."""
    specs = {tile: Fa3Spec("bfloat16", "bfloat16", head_dim, head_dim, schedule="items", tile=tile) for tile in tiles}
    made = artifacts.get_many({fa3_tiles.ARCH: list(specs.values())}, program)
    outcomes = {tile: made[fa3_tiles.ARCH, spec] for tile, spec in specs.items()}
    return [
        tile
        for tile, made in outcomes.items()
        if isinstance(made, Artifact) and not made.stack_bytes and made.smem_bytes <= SMEM_LIMIT
    ]


def time_tiles(w: BatchWorkload, rounds: int, tiles: Sequence[HopperTile]) -> Rates:
    """Returns the TFLOP/s of the tiles whose kernels compile and are correct."""
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    sets = [w.inputs(device, seed) for seed in range(w.num_sets(l2_bytes))]
    names = {str(tile): tile for tile in compile_tiles(w.head_dim, tiles)}
    calls, _ = bench.prepare(w, {name: functools.partial(bind, tile) for name, tile in names.items()}, sets)
    timings = measure(calls, CudaGraphTimer(), rounds).timings
    return {names[n]: w.metric.value(t.median_us) for n, t in timings.items() if not isinstance(t, str)}


def workloads(head_dim: int, heads: tuple[int, int], lengths: str) -> list[BatchWorkload]:
    sizes = [tuple(map(int, text.split("x"))) for text in lengths.split(",")]
    return [equal(b, n, n, heads, head_dim, causal=causal) for b, n in sizes for causal in (False, True)]


def main(argv: Sequence[str] | None = None) -> int:
    if "--rows" in (sys.argv if argv is None else argv):
        return tile_trials.main(argv)
    parser = argparse.ArgumentParser(prog="python -m perf.search", description=__doc__)
    parser.add_argument("--head-dim", type=int, required=True, help="head dimension of q, k and v")
    parser.add_argument("--heads", default="16/16", help="query and kv heads (default: 16/16)")
    parser.add_argument("--lengths", default=LENGTHS, help=f"requests x tokens (default: {LENGTHS})")
    parser.add_argument("--rounds", type=int, default=7, help="number of timed rounds (default: 7)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no step later than this (default: no limit)"
    )
    options = parser.parse_args(argv)
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    dim = options.head_dim
    q_heads, kv_heads = map(int, options.heads.split("/"))
    table = workloads(dim, (q_heads, kv_heads), options.lengths)
    start = fa3_tiles.choose(TileProblem((dim, dim)))
    winners = {start: None}
    end = time.monotonic() + options.seconds
    for w in table:
        rate = functools.partial(time_tiles, w, options.rounds)
        best, gain = climb(start, functools.partial(neighbours, dim), rate, lambda: time.monotonic() < end)
        print(f"{w.name}: {best}, {gain:.3f} of {start}", flush=True)
        winners[best] = None
    row = proposal({w.name: time_tiles(w, options.rounds, list(winners)) for w in table})
    print(f"    ({dim}, {dim}): {row},")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
