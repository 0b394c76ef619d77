"""Tiles of the wgmma kernel that plans are made to take: names, what fits an SM, launches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from cute_attn.kernels.blocks.tiles import TileProblem
from cute_attn.kernels.fa3 import tiles
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec, HopperTile
from cute_attn.kernels.host.persistent import family
from cute_attn.kernels.host.persistent.family import PersistentFamily
from cute_attn.kernels.programs import program
from cute_attn.problem import Features
from cute_attn.runtime import artifacts
from perf import peers
from perf.harness import Call
from perf.machine import require
from perf.rings import forced
from perf.workloads import BatchWorkload

SMEM_LIMIT = 227 << 10  # of a CTA
SM_SMEM, CTA_RESERVE = 228 << 10, 1 << 10  # of an SM, and what the system takes of it per CTA
REGISTERS = {2: 212, 3: 132}  # per thread for accumulators and probabilities, by number of MMA warpgroups
SPEC_DTYPES = {"e4m3": "float8_e4m3fn"}
FORM = (
    "ROWSxCOLUMNS STAGES+QUERY_TILES [xCTAS] [ping-pong] [q-registers-COLUMNS] [first-key] "
    "[packed|unpacked] [sections-of-N-MiB]"
)
TILE = re.compile(r"(\d+)x(\d+) (\d+)\+(\d+)(?: x(\d+))?( ping-pong)?(?: q-registers-(\d+))?( first-key)?")
WAY = re.compile(r"(?: ?(packed|unpacked))?(?: ?sections-of-(\d+)-MiB)?")


class Trial(NamedTuple):
    """Way to run a row; None: the table's. `packed`: the heads of a group share tiles. `section_mib`: K, V in L2."""

    tile: HopperTile | None = None
    packed: bool | None = None
    section_mib: int | None = None

    @property
    def name(self) -> str:
        """Name that `parse` reads: "128x48 4+2 x2 first-key packed" has 4 stages, 2 query tiles, 2 CTAs an SM;
        "q-registers-128": of q, 128 columns."""
        words = []
        if tile := self.tile:
            words += [f"{tile.rows}x{tile.cols}", f"{tile.stages}+{tile.q_stages}"]
            words += [f"x{tile.per_sm}"] * (tile.per_sm > 1) + ["ping-pong"] * tile.ping_pong
            words += [f"q-registers-{tile.q_registers}"] * (tile.q_registers > 0) + ["first-key"] * tile.from_first_key
        if self.packed is not None:
            words.append("packed" if self.packed else "unpacked")
        if self.section_mib is not None:
            words.append(f"sections-of-{self.section_mib}-MiB")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Trial:
        """Returns the trial of a name; a part that is left out is that of the table."""
        found = TILE.match(text)
        way = WAY.fullmatch(text, found.end() if found else 0)
        if not text or way is None:
            raise ValueError(f"a tile is {FORM}, got {text!r}")
        packed, shape = {None: None, "packed": True, "unpacked": False}[way[1]], None
        if found:
            rows, cols, stages, q_stages, per_sm, q_registers = (int(found[i] or 0) for i in (1, 2, 3, 4, 5, 7))
            more: dict[str, Any] = {"per_sm": max(per_sm, 1), "q_registers": q_registers}
            more |= {"ping_pong": bool(found[6]), "from_first_key": bool(found[8])}
            shape = HopperTile(rows, cols, stages, q_stages, **more)
        return cls(shape, packed, int(way[2]) if way[2] else None)


# ---- what is tried


def of_table(w: BatchWorkload) -> HopperTile:
    """Returns the tile of the table for long requests of these head dims."""
    return tiles.choose(TileProblem((w.head_dim, w.head_dim_vo)))


def neighbours(head_dim: int, start: HopperTile) -> list[HopperTile]:
    """Returns the tiles that differ in one field and fit."""
    steps = -(-head_dim // 16)  # of the sum of a score
    changes: list[dict[str, int | bool]] = [
        {"rows": 320 - start.rows},
        *({"cols": start.cols + step} for step in (-32, -16, 16, 32) if 0 < start.cols + step <= 256),
        *({"stages": start.stages + step} for step in (-1, 1) if start.stages + step >= 2),
        {"q_stages": 3 - start.q_stages},
        {"ping_pong": not start.ping_pong},
        *({"q_registers": share * steps // 2 * 16} for share in (0, 1, 2)),
    ]
    found = [dataclasses.replace(start, **change) for change in changes]  # type: ignore[arg-type]
    return [other for other in dict.fromkeys(found) if other != start and fits_registers(head_dim, other)]


def fits_registers(head_dim: int, shape: HopperTile) -> bool:
    """Tells whether a tile fits shared memory, and S, P, O and q, where it is there, the registers."""
    registers = shape.cols // 2 + shape.cols // 4 + head_dim // 2 + min(head_dim, shape.q_registers) // 4
    return HopperMemory(shape, head_dim, head_dim).bytes <= SMEM_LIMIT and registers <= REGISTERS[shape.mma_warpgroups]


def fits(shape: HopperTile, smem_bytes: int) -> bool:
    """Tells whether as many CTAs of so much shared memory as the tile wants fit an SM."""
    return smem_bytes <= SMEM_LIMIT and shape.per_sm * (smem_bytes + CTA_RESERVE) <= SM_SMEM


def spec(w: BatchWorkload, shape: HopperTile) -> Fa3Spec:
    """Returns the kernel of a workload with this tile."""
    dtype, mask = SPEC_DTYPES.get(w.dtype, w.dtype), "band" if w.window_left >= 0 else "stop"
    return Fa3Spec(dtype, "bfloat16", w.head_dim, w.head_dim_vo, mask=mask, schedule="items", tile=shape)


# ---- launches


def force(trial: Trial) -> AbstractContextManager[None]:
    """Makes plans take the tile, the heads and the sections of a trial."""

    def heads(_: object, features: Features, qo_len: int, tile: HopperTile) -> int:
        return features.num_qo_heads // features.num_kv_heads if trial.packed else 1

    patches: list[Any] = []
    if trial.tile is not None:
        patches.append(mock.patch.object(PersistentFamily, "tile", return_value=trial.tile))
    if trial.packed is not None:
        patches.append(mock.patch.object(PersistentFamily, "heads_per_tile", heads))
    if trial.section_mib is not None:
        names = "SECTION_BYTES", "SHORT_SECTION_BYTES"
        patches += [mock.patch.object(family, name, trial.section_mib << 20) for name in names]
    return forced(*patches)


def bind(trial: Trial, w: BatchWorkload, sets: Sequence[Any], backend: str = "fa3") -> list[Call]:
    """Binds a trial, unless its kernel needs stack or too much shared memory."""
    if trial.tile is not None:
        made = artifacts.get(spec(w, trial.tile), tiles.ARCH, program)
        require(not made.stack_bytes, f"it needs {made.stack_bytes} bytes of stack")
        require(fits(trial.tile, made.smem_bytes), f"{trial.tile.per_sm} CTAs of {made.smem_bytes} bytes fit no SM")
    with force(trial):
        calls = peers.ours(backend, w, sets)
        for call in calls:
            call()  # a first run may plan once more, for what it brings
    return calls
