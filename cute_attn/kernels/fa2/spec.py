"""Compile key and tile of the mma.sync kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.blocks.attention_spec import AttentionSpec
from cute_attn.kernels.formats import Ruled


@dataclass(frozen=True)
class Tile(Ruled):
    """Work of one CTA and its warps.

    `rows` query rows (token x head of one group) by `cols` kv tokens per step; warps are laid out
    `warps_rows` x `warps_cols`: with `warps_cols > 1` every warp owns its own kv columns and softmax state,
    merged once at the end. `stages` K/V tiles are in flight in shared memory.

    `exchange`: the warps of a row share its softmax state instead. Each computes the scores of its kv columns, P goes
    through shared memory, and each of all warps owns a slice of the output's columns for all rows: for head dims whose
    outputs exceed the registers of a warp.
    """

    rows: int
    cols: int
    warps_rows: int
    warps_cols: int
    stages: int
    exchange: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps_rows * self.warps_cols

    @property
    def one_team(self) -> bool:
        """Whether all warps load and consume the same kv tiles."""
        return self.warps_cols == 1 or self.exchange

    @property
    def team_cols(self) -> int:
        """kv tokens of a tile that the same threads load and consume."""
        return self.cols if self.one_team else self.cols // self.warps_cols

    def rules(self) -> dict[str, bool]:
        loaders = self.threads if self.one_team else 32  # threads that copy the same rows, 8 per row
        columns = 8 if self.exchange else 16  # of P and of S: one A operand, or one accumulator
        return {
            "rows must be a multiple of 16 for every warp row": self.rows % (16 * self.warps_rows) == 0,
            "cols must be a multiple of 16": self.cols % 16 == 0,
            f"cols must be a multiple of {columns} for every warp column": self.cols % (columns * self.warps_cols) == 0,
            "cols must divide into whole passes of the copying threads": self.cols % (loaders // 8) == 0,
            "warps must be a power of two": self.threads & (self.threads - 1) == 0,
            "stages must be at least 2": self.stages >= 2,
        }


@dataclass(frozen=True)
class Fa2Spec(AttentionSpec):
    """Spec of the mma.sync attention kernel."""

    kernel: ClassVar[str] = "fa2"
    mask: str = "band"
    pos_encoding: str = "none"  # "none" or "rope"
    kv_copy_bytes: int = 16  # of one copy of k or v: 8 for fp8 rows that do not start and end at multiples of 16 bytes
    tile: Tile = Tile(128, 64, 4, 1, 2)

    def rules(self) -> dict[str, bool]:
        if not self.fp8:
            return {}
        return {
            "cols must be a multiple of 32 for every warp column": self.tile.cols % (32 * self.tile.warps_cols) == 0,
            "warps cannot exchange P": not self.tile.exchange,
            "kv_dtype must be ''": not self.kv_dtype,
            "pos_encoding must be 'none'": self.pos_encoding == "none",
        }
