"""K and V tiles with block scales: rows as another source loads them, and behind them in the slot the scales of every
row, copied by the lanes of the producer warp.

A token's scales may start at any multiple of 4 bytes, which TMA does not take. Each lane copies those of the rows
`lane`, `lane` + 32, ... with `cp.async`; rows past the end get zeros, which hides what their elements hold.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.kv_sources import DenseTmaKV, GatheredFp8KV, KvSource, PageTable
from cute_attn.kernels.blocks.persistent_params import Maps, extended
from cute_attn.kernels.blocks.producer import Producer
from cute_attn.kernels.blocks.tile_scheduler import QueryTile

LANES = 32
WORD = 4

PARTS = ("", "_stride_page", "_stride_n", "_stride_h")  # of the names of each operand's parameters
BlockScaledParams = extended("BlockScaledParams", {f"{x}_scales{part}": Int64 for x in "kv" for part in PARTS})


@dataclass(frozen=True)
class ScaleRows:
    """Block scales of K or V of one kv head: address of token 0, of page 0, strides in bytes, 4-byte words per row, and
    their offset in a slot.
    """

    base: Int64
    page_stride: Int64
    stride: Int64
    words: int
    offset: int


@dataclass(frozen=True)
class ScaledOperand:
    """K or V: its rows, as the source of these takes them, and their scales."""

    rows: Any
    scales: ScaleRows


@dataclass(frozen=True)
class DenseTokens:
    """Tokens of contiguous keys, of which token 0 is row `start`."""

    start: Int32
    kv_end: Int32

    def address(self, scales: ScaleRows, token: Int32, page: Int32) -> Int64:
        return scales.base + Int64(self.start + token) * scales.stride


@dataclass(frozen=True)
class BlockScaledKV(KvSource):
    """Source of K and V with block scales. `source` loads their rows."""

    cols: int
    lane: Int32
    tokens: DenseTokens | PageTable
    source: Any
    k: ScaledOperand
    v: ScaledOperand

    @property
    def rounds(self) -> list[int]:
        return list(range(0, self.cols, LANES))

    @property
    def by_lanes(self) -> bool:
        """Whether the source's lanes load rows too, by the page ids that scales need, and arrive at the barrier."""
        return isinstance(self.source, GatheredFp8KV)

    def prefetch_page_ids(self, kv_tile: Int32) -> list[Int32]:
        """Loads the page ids of the source, then those of this lane's rows."""
        page_ids, pages = self.source.prefetch_page_ids(kv_tile), self.tokens
        if self.by_lanes or isinstance(pages, DenseTokens):
            return page_ids
        return page_ids + pages.page_ids((Boolean(True), kv_tile * self.cols + self.lane + row) for row in self.rounds)

    def copy(
        self, operand: ScaledOperand, target: Int32, barrier: Int32, kv_tile: Int32, page_ids: list[Int32]
    ) -> None:
        count = len(self.rounds) if isinstance(self.tokens, PageTable) else 0
        self.copy_scales(operand.scales, target, kv_tile, page_ids[len(page_ids) - count :])
        if self.by_lanes:
            self.source.copy(operand.rows, target, barrier, kv_tile, page_ids)  # its arrivals cover the scales
        else:
            self.source.copy(operand.rows, target, barrier, kv_tile, page_ids[: len(page_ids) - count])
            ptx.cp_async_arrive(barrier)

    @cute.jit
    def copy_scales(self, scales: cutlass.Constexpr, target: Int32, kv_tile: Int32, page_ids: list[Int32]) -> None:
        pitch = scales.words * WORD
        for i in cutlass.range_constexpr(len(self.rounds)):
            row = self.lane + self.rounds[i]
            token = kv_tile * self.cols + row
            page = page_ids[i] if cutlass.const_expr(len(page_ids) > 0) else Int32(0)
            address = self.tokens.address(scales, token, page)
            size = ptx.select(token < self.tokens.kv_end, Int32(WORD), Int32(0))
            exists = True if self.rounds[i] + LANES <= self.cols else row < self.cols
            if exists:
                self.copy_row(scales, target + scales.offset + row * pitch, address, size)

    def copy_row(self, scales: ScaleRows, target: Int32, address: Int64, size: Int32) -> None:
        for word in range(scales.words):
            ptx.cp_async(target + WORD * word, 0, address + Int64(WORD * word), 0, size, WORD)


class BlockScaledProducer(Producer):
    """Producer of K and V with block scales: TMA and all lanes, or these alone, arrive at full barriers."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        arrivals = LANES if self.source_type is GatheredFp8KV else LANES + self.source_type.arrivals
        loaded = (self.memory.loaded_ring("k"), self.memory.loaded_ring("v"))
        self.role = replace(self.role, fills={**self.role.fills, **dict.fromkeys(loaded, arrivals)})

    def source(self, p: Any, maps: Maps, work: QueryTile) -> Any:
        source = super().source(p, maps, work)
        kv_head = work.kv_head(p)
        cols, lane = self.spec.tile.cols, cute.arch.thread_idx()[0]
        k, v = (
            ScaledOperand(
                rows,
                ScaleRows(
                    getattr(p, f"{name}_scales") + Int64(kv_head) * getattr(p, f"{name}_scales_stride_h"),
                    getattr(p, f"{name}_scales_stride_page"),
                    getattr(p, f"{name}_scales_stride_n"),
                    *self.memory.scales(name),
                ),
            )
            for name, rows in (("k", source.k), ("v", source.v))
        )
        dense = self.source_type is DenseTmaKV
        tokens = DenseTokens(work.kv_start, work.kv_end) if dense else source.pages
        return BlockScaledKV(cols, lane, tokens, source, k, v)
