"""Times tiles of the wgmma kernel that are not in its table, beside the table's and the peers:
`python -m perf.search --rows all --out perf/results/trials.json`. Reached by `perf.search`; GPU only.

Every row has the tiles worth trying on it, in one process with the peers: kernels are compiled first, checked against
the fp64 reference, and timed in random order. Kernels that need stack are left out. What wins is entered by hand into
`cute_attn/kernels/fa3/tiles.py` and its neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import cute_attn
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.fa3.tiles import ARCH
from cute_attn.kernels.host.persistent import variant
from cute_attn.kernels.host.persistent.batch import tiling
from cute_attn.kernels.host.persistent.variant import PersistentKernels
from cute_attn.kernels.programs import program
from cute_attn.problem import Settings
from cute_attn.runtime import artifacts
from perf import batch_peers, sections
from perf.batch_workloads import BatchWorkload, equal
from perf.bench import OURS, AnyWorkload
from perf.harness import ROUNDS, Call
from perf.machine import why_no_gpu
from perf.optional import require
from perf.peers import Bind
from perf.sections import Section
from perf.workloads import Inputs, Workload

SMEM_LIMIT = 227 << 10  # of a CTA
SM_SMEM, CTA_RESERVE = 228 << 10, 1 << 10  # of an SM, and what the system takes of it per CTA
BUDGET = 120.0  # seconds
PEER_NAMES = ("torch cuDNN", "flash-attn-4")
SPEC_DTYPES = {"e4m3": "float8_e4m3fn"}


class Trial(NamedTuple):
    """Way to run a row. `tile`: None, that of the table. `packed`: whether the heads of a group share tiles; None: as
    the family says. `section_mib`: keys and values of an L2 section; None: as ever.
    `cuts_last_wave`: False, never.
    """

    tile: HopperTile | None = None
    packed: bool | None = None
    section_mib: int | None = None
    cuts_last_wave: bool = True

    @property
    def name(self) -> str:
        """Name of the candidate: "cute_attn 128x48 4+2 x2 first-key packed" has 4 stages, 2 query tiles, 2 CTAs an
        SM; "q-registers-128": of q, 128 columns."""
        words = [OURS]
        if tile := self.tile:
            words += [f"{tile.rows}x{tile.cols}", f"{tile.stages}+{tile.q_stages}"]
            words += [f"x{tile.per_sm}"] * (tile.per_sm > 1) + ["ping-pong"] * tile.ping_pong
            words += [f"q-registers-{tile.q_registers}"] * (tile.q_registers > 0) + ["first-key"] * tile.from_first_key
        if self.packed is not None:
            words.append("packed" if self.packed else "unpacked")
        if self.section_mib is not None:
            words.append(f"sections-of-{self.section_mib}-MiB")
        if not self.cuts_last_wave:
            words.append("whole-tiles")
        return " ".join(words)


class Row(NamedTuple):
    """Workload with what is tried on it, beside what "auto" runs."""

    workload: AnyWorkload
    trials: tuple[Trial, ...]


def tile(
    rows: int, cols: int, stages: int, q_stages: int, per_sm: int = 1, q_registers: int = 0, **fields: bool
) -> HopperTile:
    fields = {"ping_pong": False, **fields}
    return HopperTile(rows, cols, stages, q_stages, per_sm=per_sm, q_registers=q_registers, **fields)


def narrow(rows: int, cols: int, stages: int, q_stages: int, per_sm: int = 1, **fields: bool) -> Trial:
    """Returns a tile of packed heads whose keys begin with the first that is seen."""
    return Trial(tile(rows, cols, stages, q_stages, per_sm, from_first_key=True, **fields), packed=True)


# Columns of a packed tile of gpt-oss that see keys: 135 of 64 rows, 143 of 128, 151 of 192; with kv tiles of 64 at
# multiples of 64, 192 are computed, or 192 to 256.
GPT_OSS = (
    Trial(tile(64, 64, 3, 2, 3), packed=True),
    narrow(64, 48, 4, 2, 3),
    narrow(64, 48, 2, 2, 4),
    narrow(128, 48, 4, 2, 2),
    narrow(192, 80, 4, 2),
)
GPT_OSS_LONG = (
    Trial(tile(64, 64, 3, 2, 3)),
    narrow(128, 48, 4, 2, 2),
    narrow(192, 80, 4, 2, ping_pong=True),
    narrow(192, 128, 3, 2, ping_pong=True),
)
MISTRAL = (
    Trial(tile(64, 64, 2, 1, 2), packed=True),
    narrow(64, 80, 2, 1, 2),
    narrow(128, 80, 3, 2),
)
E4M3 = (
    narrow(128, 96, 3, 2),
    narrow(192, 96, 2, 2),
    Trial(tile(192, 64, 3, 2), packed=False),
)
SECTIONS_OF_L2 = tuple(Trial(section_mib=mib) for mib in (8, 16, 24, 32, 48))
# Columns of q in registers at head dim 256, where 144 spill. Requests from 16384 tokens on have 128.
HELD_Q = tuple(Trial(tile(128, 64, 2, 1, q_registers=columns)) for columns in (0, 64, 96, 128))
WIDE = (*HELD_Q, Trial(tile(128, 80, 2, 1)), Trial(section_mib=16), Trial(section_mib=48))
# Head dims of the tile of 96: three warpgroups share keys and values, or tiles have more columns. 192 x 112 needs stack
# at 96, 192 x 128 at all three.
UP_TO_96 = (
    Trial(tile(128, 160, 2, 1, ping_pong=True)),
    Trial(tile(128, 176, 2, 1, ping_pong=True)),
    Trial(tile(192, 80, 3, 1, ping_pong=True)),
    Trial(tile(192, 96, 3, 1, ping_pong=True)),
)
UP_TO_80 = (*UP_TO_96, Trial(tile(192, 112, 2, 1, ping_pong=True)))
SHORT_96 = (
    Trial(tile(192, 96, 3, 1, ping_pong=True)),
    Trial(tile(128, 96, 3, 2)),
    Trial(tile(64, 64, 2, 1, 2)),
    Trial(tile(64, 96, 2, 1, 2)),
)
TO_112 = (
    Trial(tile(128, 128, 2, 2)),
    Trial(tile(192, 80, 3, 1, ping_pong=True)),
    Trial(tile(192, 96, 3, 1, ping_pong=True)),
)
# Rows of 129 to 192 columns are three columns of 64 in shared memory. 192 x 64 needs stack at 192.
TO_192 = (
    Trial(tile(128, 64, 3, 1)),
    Trial(tile(128, 96, 2, 1)),
    Trial(tile(128, 96, 2, 1, ping_pong=True)),
    Trial(tile(128, 112, 2, 1)),
    Trial(tile(128, 112, 2, 1, ping_pong=True)),
)
TO_160 = (*TO_192, Trial(tile(192, 64, 3, 1, ping_pong=True)))
# 197 tokens: 256 rows of query tiles of 64 or 128, 384 of 192; 208 to 256 keys.
VIT = (
    Trial(tile(128, 112, 2, 2)),
    Trial(tile(128, 112, 2, 1, ping_pong=True)),
    Trial(tile(64, 64, 2, 1, 2)),
    Trial(tile(128, 64, 3, 2)),
)
VIT_64 = (
    *VIT,
    Trial(tile(128, 208, 2, 1)),
    Trial(tile(128, 64, 2, 1, 2)),
    Trial(tile(64, 112, 2, 1, 2)),
    Trial(tile(64, 64, 3, 2, 3)),
)
WHOLE_TILES = tuple(Trial(section_mib=mib, cuts_last_wave=False) for mib in (None, 16, 48))
DEEPSEEK = (
    Trial(tile(192, 80, 3, 1, ping_pong=True)),
    Trial(tile(192, 80, 2, 1, ping_pong=True)),
    Trial(tile(192, 64, 3, 1, ping_pong=True)),
    Trial(tile(128, 112, 2, 1, ping_pong=True)),
)


def causal(
    batch_size: int, length: int, heads: tuple[int, int], head_dim: int, window_left: int = -1, sinks: bool = False
) -> BatchWorkload:
    return equal(batch_size, length, length, heads, head_dim, causal=True, window_left=window_left, sinks=sinks)


def e4m3(w: BatchWorkload) -> BatchWorkload:
    return dataclasses.replace(w, dtype="e4m3", kv_dtype="e4m3")


ROWS: Mapping[str, Sequence[Row]] = {
    "gpt-oss": (Row(causal(4, 4096, (64, 8), 64, 127, sinks=True), GPT_OSS),),
    "mistral": (Row(causal(4, 4096, (32, 8), 128, 127), MISTRAL),),
    "e4m3": (Row(e4m3(causal(4, 4096, (32, 8), 128, 511)), E4M3),),
    "d256": (
        Row(equal(1, 16384, 16384, (8, 8), 256), (*WIDE, Trial(cuts_last_wave=False))),
        Row(causal(1, 16384, (8, 8), 256), WIDE),
        Row(equal(2, 8192, 8192, (8, 8), 256), HELD_Q),
        Row(causal(2, 8192, (8, 8), 256), HELD_Q),
        Row(equal(4, 4096, 4096, (8, 8), 256), HELD_Q),
        Row(causal(4, 4096, (8, 8), 256), HELD_Q),
    ),
    "short": (
        Row(causal(16, 1024, (16, 16), 128), SECTIONS_OF_L2),
        Row(causal(16, 1024, (32, 32), 64), SECTIONS_OF_L2),
        Row(causal(16, 1024, (8, 8), 256), SECTIONS_OF_L2),
    ),
    "up-to-96": (
        Row(equal(1, 4096, 4096, (16, 16), 72), UP_TO_80),
        Row(causal(4, 4096, (16, 16), 72), UP_TO_80),
        Row(equal(4, 4096, 4096, (16, 16), 80), UP_TO_80),
        Row(causal(4, 4096, (16, 16), 80), UP_TO_80),
        Row(equal(4, 4096, 4096, (32, 8), 96), UP_TO_96),
        Row(causal(4, 4096, (32, 8), 96), UP_TO_96),
        Row(causal(1, 16384, (32, 8), 96), UP_TO_96),
    ),
    "short-96": (
        Row(equal(64, 729, 729, (16, 16), 72), SHORT_96),
        Row(equal(16, 1024, 1024, (16, 16), 80), SHORT_96),
        Row(causal(16, 1024, (32, 8), 96), SHORT_96),
        Row(causal(1, 1000, (32, 8), 96), SHORT_96),
        Row(causal(8, 2048, (32, 8), 96), SHORT_96),
        Row(causal(8, 2048, (16, 16), 80), SHORT_96),
        Row(equal(8, 2048, 2048, (16, 16), 72), SHORT_96),
    ),
    "vit": (
        Row(equal(64, 197, 197, (16, 16), 64), VIT_64),
        *(Row(equal(64, 197, 197, (16, 16), head_dim), VIT) for head_dim in (72, 80)),
    ),
    "112": (
        Row(equal(4, 4096, 4096, (16, 16), 112), TO_112),
        Row(causal(4, 4096, (16, 16), 112), TO_112),
    ),
    "160": (
        Row(equal(4, 4096, 4096, (16, 16), 160), TO_160),
        Row(causal(4, 4096, (16, 16), 160), TO_160),
        Row(causal(16, 1024, (16, 16), 160), TO_160),
    ),
    "192": (
        Row(equal(4, 4096, 4096, (16, 16), 192), TO_192),
        Row(causal(4, 4096, (16, 16), 192), TO_192),
        Row(causal(16, 1024, (16, 16), 192), TO_192),
    ),
    "deepseek": tuple(
        Row(Workload(n, n, heads, heads, 192, 128, causal), DEEPSEEK)
        for n, heads, causal in ((4096, 16, True), (16384, 16, True), (16384, 16, False), (1024, 64, True))
    ),
    "last-wave": tuple(
        Row(equal(1, length, length, (heads, heads), head_dim), WHOLE_TILES)
        for length, heads, head_dim in (
            (16384, 16, 256),
            (20000, 8, 256),
            (16384, 16, 128),
            (32760, 12, 128),
            (16384, 16, 96),
        )
    ),
    "gpt-oss-long": (Row(causal(4, 4096, (64, 8), 64, 1023, sinks=True), GPT_OSS_LONG),),
}


def spec(w: AnyWorkload, shape: HopperTile) -> Fa3Spec:
    """Returns the kernel of a workload with this tile."""
    dtype, mask = SPEC_DTYPES.get(w.dtype, w.dtype), "band" if w.window_left >= 0 else "stop"
    dims = (w.head_dim_qk, w.head_dim_vo) if isinstance(w, Workload) else (w.head_dim, w.head_dim)
    return Fa3Spec(dtype, "bfloat16", *dims, mask=mask, schedule="items", tile=shape)


def fits(shape: HopperTile, smem_bytes: int) -> bool:
    """Tells whether as many CTAs of so much shared memory as the tile wants fit an SM."""
    return smem_bytes <= SMEM_LIMIT and shape.per_sm * (smem_bytes + CTA_RESERVE) <= SM_SMEM


@contextlib.contextmanager
def force(trial: Trial) -> Iterator[None]:
    """Makes plans take the tile, the heads, the sections and the waves of a trial; clears the tilings remembered before
    and afterwards."""

    def heads(_: object, settings: Settings, qo_len: int, rows: int) -> int:
        group = settings.features.num_qo_heads // settings.features.num_kv_heads
        return group if trial.packed and rows % group == 0 else 1

    tiling.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(tiling.cache_clear)
        if trial.tile is not None:
            stack.enter_context(mock.patch.object(PersistentKernels, "tile", return_value=trial.tile))
        if trial.packed is not None:
            stack.enter_context(mock.patch.object(PersistentKernels, "heads_per_tile", heads))
        if trial.section_mib is not None:
            for name in ("SECTION_BYTES", "SHORT_SECTION_BYTES"):
                stack.enter_context(mock.patch.object(variant, name, trial.section_mib << 20))
        if not trial.cuts_last_wave:
            stack.enter_context(mock.patch.object(variant, "has_equal_tiles", return_value=False))
        yield


def one_request(w: Workload, sets: Sequence[Inputs]) -> list[Call]:
    """Binds the ragged wrapper for a batch of one request."""
    workspace = torch.empty(batch_peers.WORKSPACE_BYTES, dtype=torch.uint8, device=sets[0].q.device)
    wrapper = cute_attn.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
    qo_indptr, kv_indptr = (torch.tensor([0, n], dtype=torch.int32) for n in (w.qo_len, w.kv_len))
    shape = w.num_qo_heads, w.num_kv_heads, w.head_dim_qk, w.head_dim_vo
    types: Any = {"q_data_type": w.torch_dtype, "kv_data_type": w.torch_dtype}
    wrapper.plan(qo_indptr, kv_indptr, *shape, causal=w.causal, window_left=w.window_left, **types)
    return [functools.partial(wrapper.run, x.q, x.k, x.v) for x in sets]


def bind(trial: Trial, w: AnyWorkload, sets: Sequence[Any]) -> list[Call]:
    """Binds a trial, unless its kernel needs stack or too much shared memory."""
    if trial.tile is not None:
        made = artifacts.get(spec(w, trial.tile), ARCH, program)
        require(not made.stack_bytes, f"it needs {made.stack_bytes} bytes of stack")
        require(fits(trial.tile, made.smem_bytes), f"{trial.tile.per_sm} CTAs of {made.smem_bytes} bytes fit no SM")
    with force(trial):
        calls = one_request(w, sets) if isinstance(w, Workload) else batch_peers.ours("fa3", w, sets)
        for call in calls:
            call()  # a first run may plan once more, for what it brings
    return calls


def trials(w: AnyWorkload) -> dict[str, Bind]:
    """Returns what is tried on a workload, by name."""
    found = [row.trials for rows in ROWS.values() for row in rows if row.workload == w]
    return {trial.name: functools.partial(bind, trial) for trial in (found[0] if found else ())}


def compile_all(rows: Sequence[Row]) -> None:
    """Compiles the kernels of all trials, in several processes; `bind` says what went wrong."""
    specs = [spec(row.workload, trial.tile) for row in rows for trial in row.trials if trial.tile is not None]
    artifacts.get_many({ARCH: list(dict.fromkeys(specs))}, program)


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields the candidates of every row, fastest first: speed, relative to the table's tile and to the best peer."""
    for row in record["rows"]:
        entries = row["candidates"]
        speeds = {name: entry["speed"] for name, entry in entries.items() if "speed" in entry}
        own, peer = speeds.get(OURS), speeds.get(row["best_peer"])
        yield f"{row['name']} [{row['unit']}, SM {row['sm_clock_mhz']} MHz]"
        for name in sorted(speeds, key=speeds.__getitem__, reverse=True):
            ratios = [f"{speeds[name] / base:.3f}" if base else "-" for base in (own, peer)]
            yield f"  {speeds[name]:7.1f}  {ratios[0]:>5} of auto  {ratios[1]:>5} of the best peer  {name}"
        yield from (f"        -  {name}: {entry['reason']}" for name, entry in entries.items() if "reason" in entry)
    yield from (f"{name}: {why}" for name, why in record["failed_rows"].items())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.search", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "all"], required=True, help="groups of rows to run")
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every row")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help=f"of the whole run (default {BUDGET:.0f})"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds of a row (default {ROUNDS})")
    parser.add_argument("--peers", nargs="*", default=PEER_NAMES, help=f"default: {', '.join(PEER_NAMES)}")
    parser.add_argument("--resume", action="store_true", help="continue the record of --out, after a run was stopped")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the mode `--rows` of `perf.search`. Returns 0, or 2 if nothing can be measured."""
    options = parse(argv)
    if absent := why_no_gpu():
        print(f"Nothing can be measured: {absent}.", file=sys.stderr)
        return 2
    chosen = {name: rows for name, rows in ROWS.items() if name in options.rows or "all" in options.rows}
    began = time.monotonic()
    compile_all([row for rows in chosen.values() for row in rows])
    options.budget -= time.monotonic() - began
    own = {name: Section([row.workload for row in rows], more=trials) for name, rows in chosen.items()}
    record = sections.run("search", own, options)
    print("\n".join(lines(record)))
    return 0
