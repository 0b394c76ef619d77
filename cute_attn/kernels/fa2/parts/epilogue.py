"""Epilogues of the mma.sync kernel: rows of one warp, and rows whose keys several warps share."""

from dataclasses import dataclass
from functools import reduce

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import RowStats
from cute_attn.kernels.blocks.fragment_store import FragmentStore
from cute_attn.kernels.blocks.smem import swizzled, swizzled_offset
from cute_attn.kernels.fa2.smem import SharedMemory


@dataclass(frozen=True)
class WarpRows(FragmentStore):
    """Epilogue of warps that own their rows: normalises in registers and stores."""

    memory: SharedMemory
    base: Int32  # of shared memory

    def write(self, out: list[Float32], stats: RowStats) -> None:
        factors = []
        for slot in self.layout.slots:
            row = self.lanes.row(slot)
            factor, lse = self.epilogue.row(stats.maximum[slot], stats.total[slot], self.rows.head(row))
            factors.append(factor)
            self.store_lse(row, lse)
        if self.target.dtype == "float32":
            for slot in self.layout.slots:
                # A generator, so that the products are computed inside the branch that stores them.
                places = [i for i, column in self.layout.pairs(slot) if column < self.memory.head_dim_vo]
                pairs = ([x * factors[slot] for x in out[i : i + 2]] for i in places)
                self.store_pairs(self.lanes.row(slot), pairs)
        else:
            self.store_staged(out, factors)

    @cute.jit
    def store_staged(self, out: list[Float32], factors: list[Float32]) -> None:
        """Stores 16-bit rows in 16-byte chunks, staged in this warp's own rows of the Q tile.

        The CTA barrier separates these stores from the copies of Q that other warps made, if there was no kv tile, and
        from their last reads of the ring, into which rows wider than those of Q extend.
        """
        memory = self.memory
        pitch, chunks = memory.staging_pitch, memory.head_dim_vo // 8
        ptx.sync_threads()
        for slot in cutlass.range_constexpr(len(self.layout.slots)):
            chunk, within = self.first_col >> 3, self.first_col & 7
            address = self.base + swizzled(self.lanes.row(slot), chunk, pitch) + within * 2
            for i, column in self.layout.pairs(slot):
                pair = ptx.pack_16(self.target.dtype, out[i] * factors[slot], out[i + 1] * factors[slot])
                destination, offset = swizzled_offset(address, column // 8)
                ptx.st_shared_b32(destination, offset + column % 8 * 2, pair)
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
        source = self.base + swizzled(row, chunk, self.memory.staging_pitch)
        address = self.target.row(self.rows, row) + Int64(chunk * 16)
        for line in cutlass.range_constexpr((chunks + 7) // 8):
            if chunk < chunks - line * 8:
                ptx.st_global_v4(address, line * 128, ptx.ld_shared_v4(source, line * 128))


@dataclass(frozen=True)
class MergedWarps(FragmentStore):
    """Epilogue of warps that hold different kv columns of the same rows: merges them through the drained K/V ring."""

    memory: SharedMemory
    base: Int32  # of shared memory

    @cute.jit
    def write(self, out: list[Float32], stats: RowStats) -> None:
        self.publish(out, stats)
        ptx.sync_threads()
        shape, chunks = self.memory.tile, self.memory.head_dim_vo // 8
        lanes, threads = 1 << (chunks - 1).bit_length(), shape.threads
        thread = cute.arch.thread_idx()[0]
        chunk = thread % lanes
        for i in cutlass.range(0, shape.rows, threads // lanes, unroll=1):
            row = thread // lanes + i
            if cutlass.and_(row < shape.rows, self.rows.exists(row)):
                self.write_row(row, chunk, chunks)

    @cute.jit
    def publish(self, out: list[Float32], stats: RowStats) -> None:
        """Writes every warp's row stats and unnormalised outputs to shared memory."""
        memory = self.memory
        ptx.sync_threads()  # the last reads of the ring and of Q are done
        stats_at = self.base + self.lanes.warp_col * (memory.tile.rows * 8)
        out_at = self.base + memory.merge_outputs + self.lanes.warp_col * (memory.tile.rows * memory.merge_pitch)
        for slot in cutlass.range_constexpr(len(self.layout.slots)):
            row = self.lanes.row(slot)
            if self.lanes.quad_lane == 0:
                ptx.st_shared_v2_f32(stats_at + row * 8, 0, [stats.maximum[slot], stats.total[slot]])
            address = out_at + row * memory.merge_pitch + self.first_col * 4
            for i, column in self.layout.pairs(slot):
                ptx.st_shared_v2_f32(address, column * 4, out[i : i + 2])

    @cute.jit
    def write_row(self, row: Int32, chunk: Int32, chunks: cutlass.Constexpr) -> None:
        memory = self.memory
        shape = memory.tile
        parts = [ptx.ld_shared_v2_f32(self.base + row * 8, w * shape.rows * 8) for w in range(shape.warps_cols)]
        maximum = reduce(ptx.fmax, [part[0] for part in parts])
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
            self.target.store(destination, 0, [v * factor for v in values])
