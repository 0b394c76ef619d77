"""Tiles of the wgmma kernel that plans are made to take: names, what fits an SM, launches."""

from __future__ import annotations

import dataclasses
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
from cute_attn.kernels.rules import Rule
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
FIELDS = {field.name: field for field in dataclasses.fields(HopperTile)}
FORM = "NAME=NUMBER,NAME=NUMBER,... with fields of HopperTile, packed (0 or 1) and section_mib"


class Trial(NamedTuple):
    """Way to run a row; None: the table's. `packed`: the heads of a group share tiles. `section_mib`: K, V in L2."""

    tile: HopperTile | None = None
    packed: bool | None = None
    section_mib: int | None = None

    @property
    def name(self) -> str:
        """Name that `parse` reads: "rows=128,cols=48,stages=4,packed=1", without what is the default."""
        fields = {} if self.tile is None else dataclasses.asdict(self.tile)
        given = {name: value for name, value in fields.items() if value != FIELDS[name].default}
        given |= {name: value for name, value in self._asdict().items() if name != "tile" and value is not None}
        return ",".join(f"{name}={int(value)}" for name, value in given.items())

    @classmethod
    def parse(cls, text: str) -> Trial:
        """Returns the trial of a name; without fields of a tile it has that of the table."""
        try:
            given = {name: int(number) for name, number in (part.split("=") for part in text.split(","))}
            packed, section_mib = given.pop("packed", None), given.pop("section_mib", None)
            fields: Any = {n: number > 0 if FIELDS[n].type == "bool" else number for n, number in given.items()}
            return cls(HopperTile(**fields) if given else None, None if packed is None else packed > 0, section_mib)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"a tile is {FORM}, got {text!r}") from error


# ---- what is tried


def of_table(w: BatchWorkload) -> HopperTile:
    """Returns the tile of the table for long requests of these head dims."""
    return tiles.rule_of(TileProblem((w.head_dim, w.head_dim_vo))).value


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
        patches.append(mock.patch.object(PersistentFamily, "rule", return_value=Rule(trial.tile, {})))
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
        calls = peers.ours(w, sets, backend=backend)
        for call in calls:
            call()  # a first run may plan once more, for what it brings
    return calls
