"""Rescales of O: how many a kernel executed, and how many the rule of its form of softmax asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cute_attn.emulator.program import program
from perf.sass.executed import Lines
from perf.sass.score_kinds import LANES
from perf.sass.work import STEP

SLACK = 8.0  # log2
COLUMNS = 16  # that one instruction of a rescale stores; P takes others
WARPS = STEP // LANES


class Rescales(NamedTuple):
    """Rescales per warp and tile step, and rows whose anchors move per row and step, beyond the first 128 keys."""

    warps: float
    rows: float


def executed(ptx: str, symbol: str, per_unit: Lines, math_warps: Sequence[int], output_columns: int) -> float:
    """Returns the rescales per warp and tile step, from the executions of PTX lines per tile step."""
    name = f"tcgen05.st.sync.aligned.32x32b.x{COLUMNS}."
    instructions = (inst for block in program(ptx, symbol).blocks for inst, _, _ in block.insts)
    stores = [per_unit[inst.line] for inst in instructions if inst.op.startswith(name)]
    times = sum(float(by_warp[:, list(math_warps)].sum()) / len(by_warp) for by_warp in stores)
    return times / (output_columns / COLUMNS) / WARPS


def anchored(exponents: torch.Tensor, cols: int) -> Rescales:
    """Returns the rescales of trailing anchors. Where a row's sum shows that an exponential may exceed the slack, all
    rows of the warp move whose maximum does.
    """
    moved, anchor = [], exponents[:, :cols].amax(1)
    for tile in exponents.split(cols, 1)[1:]:
        warps = _any_of_warp((tile - anchor[:, None]).exp2().sum(1) > 2.0**SLACK * cols)
        rows = warps & (tile.amax(1) > anchor + SLACK)
        anchor = torch.where(rows, tile.amax(1), anchor)
        moved.append((warps, rows))
    return _rescales(moved, cols)


def row_max(exponents: torch.Tensor, cols: int) -> Rescales:
    """Returns the rescales of a softmax with row maxima: of warps where any row's maximum exceeds the slack."""
    moved, anchor = [], exponents[:, :cols].amax(1)
    for tile in exponents.split(cols, 1)[1:]:
        rows = tile.amax(1) > anchor + SLACK
        anchor = torch.where(rows, tile.amax(1), anchor)
        moved.append((_any_of_warp(rows), rows))
    return _rescales(moved, cols)


def _any_of_warp(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, LANES).any(1).repeat_interleave(LANES)


def _rescales(moved: Sequence[tuple[torch.Tensor, torch.Tensor]], cols: int) -> Rescales:
    """Averages over the steps beyond the first; `moved`: by kv tile beyond the first."""
    tiles_per_step = STEP // cols
    counted = moved[tiles_per_step - 1 :]
    warps, rows = (float(torch.stack(x).double().mean()) * tiles_per_step for x in zip(*counted, strict=True))
    return Rescales(warps, rows)


RULES = {"anchored": anchored, "row_max": row_max}
