"""Copies of Q, K and V rows into shared memory, and the ring that keeps several K/V tiles in flight."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import SharedMemory


@dataclass(frozen=True)
class Team:
    """The threads that load and consume the same rows: the CTA, or a single warp when every warp owns kv columns."""

    size: int
    thread: Int32  # index within the team
    index: Int32  # which team

    @classmethod
    def of(cls, memory: SharedMemory) -> "Team":
        thread = cute.arch.thread_idx()[0]
        if memory.tile.warps_cols == 1:
            return cls(memory.tile.threads, thread, Int32(0))
        return cls(32, thread % 32, cute.arch.make_warp_uniform(thread // 32))

    def sync(self) -> None:
        if self.size == 32:
            ptx.sync_warp()
        else:
            ptx.sync_threads()


def lanes_per_row(chunks: int) -> int:
    """Threads side by side on one row's 16-byte chunks: the next power of two, so that row and chunk are shifts."""
    return 1 << (chunks - 1).bit_length()


@dataclass(frozen=True)
class TokenRows:
    """One of K and V, for one kv head: token t at base + t * stride, `chunks` x 16 bytes."""

    base: Int64
    stride: Int64
    chunks: int
    pitch: int

    @cute.jit
    def load(self, team: Team, target: Int32, rows: cutlass.Constexpr, start: Int32, stop: Int32) -> None:
        """The team's `rows` tokens from `start`; tokens from `stop` on become zeros (a NaN there would survive 0 * V)."""
        lanes = lanes_per_row(self.chunks)
        step = team.size // lanes
        chunk, row = team.thread % lanes, team.thread // lanes
        source = self.base + Int64(start + row) * self.stride + Int64(chunk * 16)
        stride = self.stride * Int64(step)
        shared = target + row * self.pitch + chunk * 16
        if cutlass.const_expr(lanes == self.chunks) or chunk < self.chunks:
            self._copy(shared, source, stride, stop - start - row, rows, step)

    def _copy(self, shared: Int32, source: Int64, stride: Int64, left: Int32, rows: int, step: int) -> None:
        for i in range(rows // step):
            size = ptx.select(Int32(i * step) < left, Int32(16), Int32(0))
            ptx.cp_async_16(shared, i * step * self.pitch, source, size)
            source = source + stride


@dataclass(frozen=True)
class DenseKV:
    """K and V of one request as token rows; a team loads the columns that it consumes."""

    memory: SharedMemory
    team: Team
    k: TokenRows
    v: TokenRows
    kv_len: Int32

    def load(self, kv_tile: Int32, slot: Int32) -> None:
        """Starts the copy of a kv tile into the ring slot at shared address `slot`."""
        tile = self.memory.tile
        rows = tile.cols // tile.warps_cols
        row0 = self.team.index * rows
        start = kv_tile * tile.cols + row0
        self.k.load(self.team, slot + row0 * self.k.pitch, rows, start, self.kv_len)
        target = slot + Int32(self.memory.v_offset) + row0 * self.v.pitch
        self.v.load(self.team, target, rows, start, self.kv_len)
