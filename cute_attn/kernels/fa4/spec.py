"""Compile key and tile of the Blackwell kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_attn.kernels.blocks.attention_spec import PersistentSpec
from cute_attn.kernels.formats import Ruled

QUERY_TILE_ROWS = 128  # of a product: all lanes of tensor memory


@dataclass(frozen=True)
class BlackwellTile(Ruled):
    """Work of one CTA of the tcgen05 kernel: `query_tiles` tiles of 128 packed query rows by `cols` kv tokens.

    `ctas` 2: pairs of CTAs share work items. Each has its own query tiles, and half of every kv tile in shared memory,
    which the products of both read; both wait for the rows that see most.
    `k_stages` and `v_stages` tiles are in flight. `polynomial`: of every 16 pairs of exponentials, those computed on
    the FMA units instead of the MUFU. With fp8 K and V under 16-bit q, `staged` tiles as stored are also in flight.
    """

    query_tiles: int = 2
    cols: int = 128
    k_stages: int = 2
    v_stages: int = 2
    polynomial: int = 0
    ctas: int = 1
    staged: int = 0

    @property
    def per_sm(self) -> int:
        """CTAs that an SM runs at a time: tensor memory is one's."""
        return 1

    @property
    def rows(self) -> int:
        """Rows of a work item."""
        return self.ctas * self.cta_rows

    @property
    def cta_rows(self) -> int:
        return self.query_tiles * QUERY_TILE_ROWS

    @property
    def product_rows(self) -> int:
        """Rows of a product: query tiles with the same number, one per CTA, are consecutive rows of a work item."""
        return self.ctas * QUERY_TILE_ROWS

    @property
    def q_box_rows(self) -> int:
        """Rows of a TMA box of q: those of a CTA, where they are consecutive."""
        return self.cta_rows if self.ctas == 1 else QUERY_TILE_ROWS

    @property
    def k_box_rows(self) -> int:
        """Keys of a kv tile whose K a CTA loads; of V it loads all."""
        return self.cols // self.ctas

    @property
    def threads(self) -> int:
        """Threads of the warpgroup of single warps, of one softmax warpgroup per query tile, and of the epilogue."""
        return 128 * (2 + self.query_tiles)

    @property
    def transform_warps(self) -> int:
        """Warps that make operands of staged tiles: those of the single warps that have no other task."""
        return 2 if self.staged else 0

    def rules(self) -> dict[str, bool]:
        return {
            "query_tiles must be 1 or 2": self.query_tiles in (1, 2),
            "cols must be 64 or 128": self.cols in (64, 128),
            "k_stages and v_stages must be at least 1": min(self.k_stages, self.v_stages) >= 1,
            "polynomial must be 0 to 16": 0 <= self.polynomial <= 16,
            "ctas must be 1 or 2": self.ctas in (1, 2),
            "a pair needs 128 cols": self.ctas == 1 or self.cols == 128,
            # The stages of V are numbered as those of S: softmax waits for the product of the kv tile before.
            "one query tile needs two v_stages": self.query_tiles == 2 or self.v_stages == 2,
            "staged must be 0 to 2": 0 <= self.staged <= 2,
        }


@dataclass(frozen=True)
class Fa4Spec(PersistentSpec):
    """Spec of the Blackwell attention kernel: TMA, tcgen05, tensor memory, specialised warps."""

    kernel: ClassVar[str] = "fa4"
    tile: BlackwellTile = BlackwellTile()

    def rules(self) -> dict[str, bool]:
        plain = self.kv != "gathered" and not self.kv_dtype
        return {"pairs of CTAs load K and V by TMA, in the dtype of q": self.tile.ctas == 1 or plain}

    @property
    def clears_tail(self) -> bool:
        """Whether rows of the last V tile may belong to another request or to none."""
        return self.schedule == "items" and self.kv in ("dense", "paged") and not self.kv_dtype

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread of the softmax warps, of the epilogue warps and of the single warps; their total is
        what the CTA was launched with.
        """
        if self.tile.query_tiles == 1:
            return (256, 128, 120)
        # Few enough for the epilogue and the producers, and such that ptxas does not spill.
        if self.mask == "multi_item":
            return (192, 64, 64)
        return (184, 72, 72) if self.mask == "packed" and self.scores else (160, 96, 96)
