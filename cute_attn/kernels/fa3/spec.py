"""Compile key and tile of the Hopper kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.blocks.attention_spec import PersistentSpec
from cute_attn.kernels.formats import Ruled

# Registers of a producer and of an MMA thread by MMA warpgroups, where several CTAs share an SM.
SHARED_SM = {(1, 2): (24, 232), (1, 3): (24, 136), (1, 4): (24, 104), (2, 2): (24, 104)}


@dataclass(frozen=True)
class HopperTile(Ruled):
    """Work of one CTA of the wgmma kernel: `rows` packed query rows, 64 per MMA warpgroup, by `cols` kv tokens.

    `stages` K and V tiles and `q_stages` query tiles are in flight; with fp8 K and V, also `staged` tiles as stored.
    `ping_pong`: MMA warpgroups take turns at issuing products, so that the softmax of one overlaps products of another.
    `transform_warps`: warps that produce operands from staged tiles; with more than three they have a warpgroup of
    their own. `q_registers`: leading columns of q that MMA threads hold in registers (a quarter as many), which leaves
    more shared memory bandwidth to other operands and the transform warps. `per_sm`: CTAs that an SM runs at a time.
    `from_first_key`: kv tiles begin with the first key that the rows see under a window, where they would begin at
    multiples of `cols`.
    """

    rows: int
    cols: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = True
    staged: int = 0
    transform_warps: int = 3
    q_registers: int = 0
    per_sm: int = 1
    from_first_key: bool = False

    @property
    def ctas(self) -> int:
        return 1

    @property
    def q_box_rows(self) -> int:
        return self.rows

    @property
    def k_box_rows(self) -> int:
        return self.cols

    @property
    def mma_warpgroups(self) -> int:
        return self.rows // 64

    @property
    def threads(self) -> int:
        """Threads of the producer warpgroup, the MMA warpgroups and, if any, the transform warpgroup."""
        return 128 * (1 + self.mma_warpgroups + (self.transform_warps > 3))

    def rules(self) -> dict[str, bool]:
        return {
            "rows must be 64, 128 or 192": self.rows in (64, 128, 192),
            "cols must be a multiple of 16 up to 256": self.cols % 16 == 0 and 0 < self.cols <= 256,
            "stages must be at least 2": self.stages >= 2,
            "q_stages must be 1 or 2": self.q_stages in (1, 2),
            "staged must be 0 to 2": self.staged in (0, 1, 2),
            "q_registers must be a multiple of 16 up to 256": self.q_registers in range(0, 257, 16),
            "ping_pong takes two MMA warpgroups": self.rows > 64 or not self.ping_pong,
            "per_sm must be 1, or up to 4 with one MMA warpgroup, or 2 with two": self.per_sm == 1
            or (self.mma_warpgroups, self.per_sm) in SHARED_SM,
            "transform_warps must be 3 or 7, the latter with two MMA warpgroups": self.transform_warps == 3
            or (self.transform_warps == 7 and self.mma_warpgroups == 2),
        }


@dataclass(frozen=True)
class Fa3Spec(PersistentSpec):
    """Spec of the Hopper attention kernel: TMA, wgmma, specialised warps."""

    kernel: ClassVar[str] = "fa3"
    tile: HopperTile = HopperTile(128, 128)
    pos_encoding: str = "none"  # "none" or "rope": q and k are rotated, with 16-bit k and v

    def rules(self) -> dict[str, bool]:
        plain_window = self.mask == "band" and not self.scores and self.kv == "dense" and self.pos_encoding == "none"
        rule = "from_first_key takes dense keys, a band and scores that nothing modifies"
        return {rule: plain_window or not self.tile.from_first_key}

    @property
    def operands(self) -> str:
        return "rope" if self.pos_encoding == "rope" else super().operands

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer and of an MMA thread; their total is what the CTA was launched with."""
        if self.tile.transform_warps > 3:
            return (32, 224) if self.tile.q_registers else (40, 216)
        if self.tile.per_sm > 1:
            return SHARED_SM[self.tile.mma_warpgroups, self.tile.per_sm]
        if self.tile.mma_warpgroups == 3:
            return (56, 152) if self.kv == "gathered" else (32, 160)
        transforms = self.kv_dtype or self.fp8 or self.pos_encoding == "rope"
        return (24, 240) if self.kv == "dense" and not transforms else (40, 232)
