"""Epilogues of the mma.sync kernel: rows of one warp, and rows whose keys several warps share."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, RowStats, Target
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import swizzled, swizzled_offset
from cute_attn.kernels.blocks.softmax import Running, reduce_quad
from cute_attn.kernels.fa2.parts.mma import Lanes, WarpTile


@dataclass(frozen=True)
class WarpRows:
    """Epilogue of warps that own their rows: normalises in registers and stores."""

    tile: WarpTile
    lanes: Lanes
    rows: PackedRows
    target: Target | Partials
    epilogue: FinalEpilogue | PartialEpilogue
    base: Int32  # shared memory

    @cute.jit
    def write(self, out: list[Float32], stats: RowStats) -> None:
        memory = self.tile.memory
        factors = []
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            row = self.lanes.row(memory, slot)
            factor, lse = self.epilogue.row(stats.maximum[slot], stats.total[slot], self.rows.head(row))
            factors.append(factor)
            if cutlass.and_(self.lanes.lane % 4 == 0, self.rows.exists(row)):
                self.target.store_lse(self.rows, row, lse)
        if cutlass.const_expr(self.target.dtype == "float32"):
            self.store_pairs(out, factors)
        else:
            self.store_staged(out, factors)

    @cute.jit
    def store_pairs(self, out: list[Float32], factors: list[Float32]) -> None:
        """Stores fp32 directly: the pairs of a quad are 32 contiguous bytes."""
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            row = self.lanes.row(self.tile.memory, slot)
            if self.rows.exists(row):
                address = self.target.row(self.rows, row) + Int64(self.lanes.lane % 4 * 8)
                for d in cutlass.range_constexpr(self.tile.d_blocks):
                    i = 4 * ((slot // 2) * self.tile.d_blocks + d) + 2 * (slot % 2)
                    pair = [out[i] * factors[slot], out[i + 1] * factors[slot]]
                    ptx.st_global_v2_f32(address, d * 32, pair)

    @cute.jit
    def store_staged(self, out: list[Float32], factors: list[Float32]) -> None:
        """Stores 16-bit rows in 16-byte chunks, staged in this warp's own rows of the Q tile.

        The CTA barrier is needed for query tiles without any kv tile: no other barrier separates the copies of Q, which
        other warps made, from these stores.
        """
        memory = self.tile.memory
        pitch, chunks = memory.qk_pitch, memory.head_dim_vo // 8
        ptx.sync_threads()
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            address = self.base + swizzled(self.lanes.row(memory, slot), Int32(0), pitch) + self.lanes.lane % 4 * 4
            for d in cutlass.range_constexpr(self.tile.d_blocks):
                i = 4 * ((slot // 2) * self.tile.d_blocks + d) + 2 * (slot % 2)
                pair = ptx.pack_16(self.target.dtype, out[i] * factors[slot], out[i + 1] * factors[slot])
                destination, offset = swizzled_offset(address, d)
                ptx.st_shared_b32(destination, offset, pair)
        ptx.sync_warp()
        rows_per_warp = memory.tile.rows // memory.tile.warps_rows
        first = self.lanes.warp_row * rows_per_warp + self.lanes.lane // 8
        for i in cutlass.range(0, rows_per_warp, 4, unroll=1):
            row = first + i
            if self.rows.exists(row):
                self.store_row(row, chunks)

    @cute.jit
    def store_row(self, row: Int32, chunks: cutlass.Constexpr) -> None:
        """Stores a staged row with eight threads, one 128-byte line at a time."""
        chunk = self.lanes.lane % 8
        source = self.base + swizzled(row, chunk, self.tile.memory.qk_pitch)
        address = self.target.row(self.rows, row) + Int64(chunk * 16)
        for line in cutlass.range_constexpr((chunks + 7) // 8):
            if chunk < chunks - line * 8:
                ptx.st_global_v4(address, line * 128, ptx.ld_shared_v4(source, line * 128))


@dataclass(frozen=True)
class MergedWarps:
    """Epilogue of warps that hold different kv columns of the same rows: merges them through the drained K/V ring."""

    tile: WarpTile
    lanes: Lanes
    rows: PackedRows
    target: Target | Partials
    epilogue: FinalEpilogue | PartialEpilogue
    base: Int32

    @cute.jit
    def write(self, out: list[Float32], stats: RowStats) -> None:
        self.publish(out, stats)
        ptx.sync_threads()
        chunks = self.tile.memory.head_dim_vo // 8
        lanes = 1 << (chunks - 1).bit_length()
        threads = self.tile.memory.tile.threads
        thread = cute.arch.thread_idx()[0]
        chunk = thread % lanes
        for i in cutlass.range(0, self.tile.memory.tile.rows, threads // lanes, unroll=1):
            row = thread // lanes + i
            if cutlass.and_(row < self.tile.memory.tile.rows, self.rows.exists(row)):
                self.write_row(row, chunk, chunks)

    @cute.jit
    def publish(self, out: list[Float32], stats: RowStats) -> None:
        """Writes every warp's row stats and unnormalised outputs to shared memory."""
        memory = self.tile.memory
        ptx.sync_threads()  # the last reads of the ring and of Q are done
        stats_at = self.base + self.lanes.warp_col * (memory.tile.rows * 8)
        out_at = self.base + memory.merge_outputs + self.lanes.warp_col * (memory.tile.rows * memory.merge_pitch)
        for slot in cutlass.range_constexpr(self.tile.row_slots):
            row = self.lanes.row(memory, slot)
            if self.lanes.lane % 4 == 0:
                ptx.st_shared_v2_f32(stats_at + row * 8, 0, [stats.maximum[slot], stats.total[slot]])
            address = out_at + row * memory.merge_pitch + self.lanes.lane % 4 * 8
            for d in cutlass.range_constexpr(self.tile.d_blocks):
                i = 4 * ((slot // 2) * self.tile.d_blocks + d) + 2 * (slot % 2)
                ptx.st_shared_v2_f32(address, d * 32, out[i : i + 2])

    @cute.jit
    def write_row(self, row: Int32, chunk: Int32, chunks: cutlass.Constexpr) -> None:
        memory = self.tile.memory
        shape = memory.tile
        parts = [ptx.ld_shared_v2_f32(self.base + row * 8, w * shape.rows * 8) for w in range(shape.warps_cols)]
        maximum = parts[0][0]
        for part in parts[1:]:
            maximum = ptx.fmax(maximum, part[0])
        anchor = ptx.select(maximum == ptx.NEG_INF, Float32(0.0), maximum)
        weights = [ptx.exp2(part[0] - anchor) for part in parts]
        total = Float32(0.0)
        for part, weight in zip(parts, weights, strict=True):
            total = ptx.fma(part[1], weight, total)
        factor, lse = self.epilogue.row(maximum, total, self.rows.head(row))
        if chunk == 0:
            self.target.store_lse(self.rows, row, lse)
        if chunk < chunks:
            values = [Float32(0.0) for _ in range(8)]
            address = self.base + memory.merge_outputs + row * memory.merge_pitch + chunk * 32
            for w, weight in enumerate(weights):
                offset = w * shape.rows * memory.merge_pitch
                eight = ptx.ld_shared_v4_f32(address, offset) + ptx.ld_shared_v4_f32(address, offset + 16)
                values = [ptx.fma(x, weight, v) for x, v in zip(eight, values, strict=True)]
            destination = self.target.row(self.rows, row) + Int64(chunk * (8 * self.target.element_bytes))
            self.target.store_8(destination, [v * factor for v in values])


def row_stats(running: Running) -> RowStats:
    """Reduces to stats of whole rows: running sums are kept per thread of a quad, maxima negated."""
    maximum = [Float32(0.0) - shift for shift in running.shift]
    return RowStats(maximum, [reduce_quad(lambda a, b: a + b, x) for x in running.total])
