"""Copies of K and V rows into shared memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.memory import LINE, SharedMemory


@dataclass(frozen=True)
class Team:
    """The threads that load and consume the same rows: the CTA, or one warp when every warp owns kv columns."""

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


@dataclass(frozen=True)
class TokenRows:
    """K or V of one kv head: token t at base + t * stride, `chunks` x 16 bytes; in a tile, rows are `pitch` apart."""

    base: Int64
    stride: Int64
    chunks: int
    pitch: int

    def copies(self, team: Team, target: Int32, rows: int, start: Int32, left: Int32) -> Iterator[None]:
        """Issues one cp.async of this thread per `next`: the team's `rows` tokens from `start`, of which `left` exist.

        Eight threads side by side copy a row's 128-byte line. Tokens that do not exist, and chunks past the head dim,
        become zeros: a NaN there would survive 0 * V.
        """
        step = team.size // 8
        thread = ptx.opaque(team.thread)
        row, chunk = thread >> 3, thread & 7
        shared = target + swizzled(row, chunk, self.pitch)
        source = self.base + Int64(start + row) * self.stride + Int64(chunk * CHUNK)
        for i in range(rows // step):
            size = ptx.select(Int32(i * step) < left - row, Int32(CHUNK), Int32(0))
            # row + i * step has the low bits of row xor those of i * step: row < step, both powers of two.
            place = shared ^ Int32(i * step % 8 * CHUNK) if i * step % 8 else shared
            for line in range(self.pitch // LINE):
                whole = (line + 1) * 8 <= self.chunks
                part = size if whole else ptx.select(chunk < self.chunks - line * 8, size, Int32(0))
                ptx.cp_async_16(place, i * step * self.pitch + line * LINE, source, line * LINE, part)
                yield
            source = source + self.stride * Int64(step)


@dataclass(frozen=True)
class DenseKV:
    """K and V of one request as token rows; a team loads the columns that it consumes."""

    memory: SharedMemory
    team: Team
    k: TokenRows
    v: TokenRows
    kv_len: Int32

    def copies(self, kv_tile: Int32, slot: Int32, wanted: Boolean) -> Iterator[None]:
        """The copies of a kv tile into the ring slot at shared address `slot`; an unwanted tile reads nothing."""
        tile = self.memory.tile
        rows = tile.cols // tile.warps_cols
        row0 = self.team.index * rows
        start = kv_tile * tile.cols + row0
        left = ptx.select(wanted, self.kv_len - start, Int32(0))
        yield from self.k.copies(self.team, slot + row0 * self.k.pitch, rows, start, left)
        v_slot = slot + Int32(self.memory.v_offset) + row0 * self.v.pitch
        yield from self.v.copies(self.team, v_slot, rows, start, left)

    @property
    def count(self) -> int:
        """How many copies a thread makes for one tile."""
        tile = self.memory.tile
        lines = (self.memory.qk_pitch + self.memory.vo_pitch) // LINE
        return tile.cols // tile.warps_cols * 8 // self.team.size * lines
