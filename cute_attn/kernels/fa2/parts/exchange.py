"""Warps that share the softmax state of their rows and divide the output's columns: for outputs that exceed the
registers of a warp.

Per kv tile, every warp computes the scores of its rows and kv columns. Maxima and P go through shared memory, with one
CTA barrier each; then every warp adds P V for all rows of the CTA and its slice of the output's columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import RowStats
from cute_attn.kernels.blocks.fragment_store import FragmentStore
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.row_exchange import RowExchange
from cute_attn.kernels.blocks.smem import CHUNK, swizzled, swizzled_offset
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax, any_of
from cute_attn.kernels.fa2.parts.mma import WarpTile
from cute_attn.kernels.fa2.smem import SharedMemory


class SlicedTile(WarpTile):
    """One warp's share of the scores, `m_blocks` x 16 rows by `n_blocks` x 8 kv columns, and of the output, all rows of
    the CTA by `d_blocks` x 8 columns.
    """

    @property
    def d_blocks(self) -> int:
        return self.memory.slice_bytes // CHUNK

    @property
    def output_layout(self) -> MmaFragmentLayout:
        return MmaFragmentLayout(self.memory.tile.rows // 16, self.d_blocks)

    def scores(self, q: Int32, k: Int32, copies: Iterator[None], count: int) -> list[Float32]:
        """Computes S as `WarpTile.scores`, in two sums, of even and odd k-steps: few blocks of S in one sum each would
        wait for one another.

        One ldmatrix brings 16 columns of K, or with `n_blocks` 1 those 8 columns for two k-steps.
        """
        layout = self.scores_layout
        sums = [layout.zeros(), layout.zeros()]
        steps = self.memory.head_dim_qk // 16
        for step in range(steps):
            a = self.rows_of(q, step, self.m_blocks, self.memory.qk_pitch)
            if self.n_blocks > 1:
                b = self.rows_of(k, step, self.n_blocks // 2, self.memory.qk_pitch)
                blocks = [half for four in b for half in (four[:2], four[2:])]
            elif step % 2 == 0:
                [both] = self.rows_of(k, step, 1, self.memory.qk_pitch)
                blocks = [both[:2]]
            else:
                blocks = [both[2:]]
            for n, block in enumerate(blocks):
                for m in range(self.m_blocks):
                    self._mma(sums[step % 2], layout.block(m, n), a[m], block)
            for _ in range(count * step // steps, count * (step + 1) // steps):
                next(copies)
        return [even + odd for even, odd in zip(*sums, strict=True)]

    @staticmethod
    def rows_of(address: Int32, step: int, count: int, pitch: int) -> list[list[Int32]]:
        """Loads k-step `step` of `count` x 16 rows."""
        at, offset = swizzled_offset(address, 2 * step)
        return [ptx.ldmatrix_x4(at, i * 16 * pitch + offset) for i in range(count)]


class Exchange(RowExchange):
    """Exchange of the warps of a CTA, which also tell each other how the rows' state moved, and all need all of P."""

    @cute.jit
    def put_factors(self, values: list[Float32]) -> None:
        """Writes a number per row, which the warps of the row agree on."""
        if cutlass.and_(self.lanes.quad_lane == 0, self.lanes.warp_col == 0):
            factors = self.base + Int32(self.memory.row_factors)
            for slot in cutlass.range_constexpr(len(self.layout.slots)):
                ptx.st_shared_f32(factors + self.lanes.row(slot) * 4, 0, values[slot])

    def factor(self, row: Int32) -> Float32:
        return ptx.ld_shared_f32(self.base + Int32(self.memory.row_factors) + row * 4)

    def fragments_of_p(self) -> list[list[list[Int32]]]:
        """Loads the A fragments of P, [block of 16 rows][k-step]."""
        memory, lane = self.memory, self.lanes.lane
        address = self.base + Int32(memory.p) + lane % 16 * memory.p_pitch + lane // 16 * CHUNK
        return [
            [
                ptx.ldmatrix_x4(address, m * 16 * memory.p_pitch + step * 2 * CHUNK)
                for step in range(memory.tile.cols // 16)
            ]
            for m in range(memory.tile.rows // 16)
        ]


@dataclass(frozen=True)
class SharedRows:
    """Softmax of rows whose scores several warps hold, and the products with V."""

    tile: SlicedTile
    softmax: RunningSoftmax
    exchange: Exchange

    def add(self, running: Running, s: list[Float32], operand: Int32, masked: bool) -> Running:
        """Adds a tile with scores `s` and 16-bit K and V at `operand` to the running state."""
        softmax, exchange = self.softmax, self.exchange
        exchange.put_column(softmax.row_max(s))
        ptx.sync_threads()
        row_max = [reduce(ptx.fmax, exchange.columns(exchange.lanes.row(slot))) for slot in softmax.slots]
        rescale = softmax.raised(running.shift, row_max, softmax.exceeded(running.shift, row_max))
        p = softmax.exponentials(s, rescale.shift, may_be_empty=masked)
        exchange.put_p(p, self.tile.dtype)
        exchange.put_factors(rescale.factors)
        total = [x * factor for x, factor in zip(running.total, rescale.factors, strict=True)]
        total = softmax.sums(p, total)
        ptx.sync_threads()
        out = self.rescale_if_needed(running.out)
        v = operand + Int32(exchange.memory.operand_v) + exchange.lanes.v
        out = self.tile.accumulate(out, exchange.fragments_of_p(), v)
        return Running(out, rescale.shift, total)

    @cute.jit
    def rescale_if_needed(self, out: list[Float32]) -> list[Float32]:
        """Applies the factors of rows whose anchors moved."""
        layout = self.tile.output_layout
        first = MmaFragmentLayout.lane_row(self.exchange.lanes.lane)
        factors = [self.exchange.factor(first + MmaFragmentLayout.row(slot)) for slot in layout.slots]
        if cute.arch.vote_any_sync(any_of([factor != Float32(1.0) for factor in factors])):
            out = layout.scale_rows(out, factors)
        return out


@dataclass(frozen=True)
class SlicedRows(FragmentStore):
    """Epilogue of warps that own slices of the output's columns; `layout` is that of a slice."""

    memory: SharedMemory
    base: Int32  # of shared memory

    @cute.jit
    def write(self, out: list[Float32], stats: RowStats) -> None:
        scores = SlicedTile(self.target.dtype, self.memory).scores_layout
        exchange = Exchange(self.memory, self.base, self.lanes, scores)
        ptx.sync_threads()  # the last reads of P, the factors and Q are done
        exchange.put_column(stats.total)
        exchange.put_factors(stats.maximum)
        ptx.sync_threads()
        for slot in cutlass.range_constexpr(len(self.layout.slots)):
            row = self.row(slot)
            total = Float32(0.0)
            for part in exchange.columns(row):
                total = total + part
            factor, lse = self.epilogue.row(exchange.factor(row), total, self.rows.head(row))
            if self.warp == 0:
                self.store_lse(row, lse)
            values = [[x * factor for x in out[i : i + 2]] for i, _ in self.layout.pairs(slot)]
            if cutlass.const_expr(self.target.dtype == "float32"):
                self.store_slice(row, values)
            else:
                self.stage(row, values)
        if cutlass.const_expr(self.target.dtype != "float32"):
            ptx.sync_warp()
            self.store_staged()

    @property
    def warp(self) -> Int32:
        return self.lanes.warp_row * self.memory.tile.warps_cols + self.lanes.warp_col

    def row(self, slot: int) -> Int32:
        """Row of a slot of the output, of which every warp has all rows."""
        return MmaFragmentLayout.lane_row(self.lanes.lane) + MmaFragmentLayout.row(slot)

    @cute.jit
    def store_slice(self, row: Int32, pairs: list[list[Float32]]) -> None:
        """Stores fp32 pairs of a row: those of a quad are 32 contiguous bytes."""
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.warp * (2 * self.memory.slice_bytes))
            for i in cutlass.range_constexpr(len(pairs)):
                ptx.st_global_v2_f32(address + Int64(self.lanes.quad_lane * 8), i * 32, pairs[i])

    def stage(self, row: Int32, pairs: list[list[Float32]]) -> None:
        """Writes 16-bit pairs of a row to the drained Q tile, at the row's own place."""
        address = self.base + swizzled(row, Int32(0), self.memory.qk_pitch)
        address = address + self.warp * self.memory.slice_bytes + self.lanes.quad_lane * 4
        for chunk, pair in enumerate(pairs):
            destination, offset = swizzled_offset(address, chunk)
            ptx.st_shared_b32(destination, offset, ptx.pack_16(self.target.dtype, *pair))

    @cute.jit
    def store_staged(self) -> None:
        """Stores the warp's slice of all rows: eight threads per row, one 128-byte line at a time."""
        pitch, columns = self.memory.qk_pitch, self.warp * self.memory.slice_bytes
        chunk = self.lanes.lane % 8
        for row in cutlass.range(self.lanes.lane // 8, self.memory.tile.rows, 4, unroll=1):
            if self.rows.exists(row):
                source = self.base + swizzled(row, chunk, pitch) + columns
                address = self.target.row(self.rows, row) + Int64(columns + chunk * CHUNK)
                for line in cutlass.range_constexpr(self.memory.slice_bytes // 128):
                    ptx.st_global_v4(address, line * 128, ptx.ld_shared_v4(source, line * 128))
