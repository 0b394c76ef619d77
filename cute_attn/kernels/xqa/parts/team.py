"""Teams of warps that share the columns of a tile, where a thread's registers cannot hold a row's queries and outputs.

Each warp copies its own columns of K and V into its ring, multiplies them with its columns of Q, and holds its columns
of the output. Only scores need the columns of all: the warps of a team add up their partial scores in shared memory and
go on with equal softmax states. The tokens, the masks and the rest of the kernel are those of one warp.
"""

from dataclasses import dataclass
from typing import TypeVar

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.scalars import shared_memory, warp_index
from cute_attn.kernels.blocks.tma import named_sync
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec

Address = TypeVar("Address", Int32, Int64)
FIRST_BARRIER = 1  # barrier 0 is that of the CTA


class LoneWarp:
    """A warp that has all columns."""

    size = 1

    def number(self, warp: Int32) -> Int32:
        """Team of a warp."""
        return warp

    def thread(self) -> Int32:
        """Index of this thread among those of the CTA that have the same columns of the same segment."""
        return cute.arch.thread_idx()[0]

    def shifted(self, x: Address, width: int) -> Address:
        """`x`, moved by `width` for every warp of the team before this one."""
        return x

    def score_scale(self, log2_scale: list[Float32]) -> list[Float32]:
        """Factors from the results of `total_scores` to base-2 exponents, by column slot."""
        return log2_scale

    def total_scores(self, s: list[Float32], log2_scale: list[Float32], tile: Int32) -> list[Float32]:
        """Scores of the tile from a warp's share of them. `tile` counts the tiles of a segment."""
        return s


class HeadWarp(LoneWarp):
    """A warp that alone has a unit: all tiles of a segment that its CTA has, and all their outputs."""

    def number(self, warp: Int32) -> Int32:
        return Int32(0)

    def thread(self) -> Int32:
        return cute.arch.thread_idx()[0] & 31


@dataclass(frozen=True)
class WarpTeam:
    """Adjacent warps, of which each has as many columns."""

    spec: XqaSpec
    memory: XqaMemory

    @property
    def size(self) -> int:
        return self.spec.team

    def number(self, warp: Int32) -> Int32:
        return warp // self.size

    def thread(self) -> Int32:
        return self.number(warp_index()) * 32 + (cute.arch.thread_idx()[0] & 31)

    def shifted(self, x: Address, width: int) -> Address:
        return x + type(x)(warp_index() % self.size * width)

    def score_scale(self, log2_scale: list[Float32]) -> list[Float32]:
        return [Float32(1.0) for _ in log2_scale]

    def total_scores(self, s: list[Float32], log2_scale: list[Float32], tile: Int32) -> list[Float32]:
        """Warps may have scaled their columns of Q differently, so what they exchange is scaled back. Every warp adds
        the same numbers in the same order, its own read back too: states must not differ in a bit, because partial
        results have one maximum and sum per row. Tiles take turns with two buffers: a warp that writes one again has
        met its team since all have read it.
        """
        size, first = self.memory.score_bytes, self.number(warp_index()) * self.size
        lane = cute.arch.thread_idx()[0] & 31
        team = shared_memory() + self.memory.partial_scores + first * (2 * size) + (tile & 1) * size + lane * 16
        own = self.shifted(team, 2 * size)
        slots = len(log2_scale)
        scaled = [x * log2_scale[i // 4 % (slots // 2) * 2 + i % 2] for i, x in enumerate(s)]
        for i in range(0, len(s), 4):
            ptx.st_shared_v4_f32(own, i * 128, scaled[i : i + 4])
        named_sync(FIRST_BARRIER + self.number(warp_index()), 32 * self.size)
        total = [Float32(0.0) for _ in s]
        for mate in range(self.size):
            for i in range(0, len(s), 4):
                part = ptx.ld_shared_v4_f32(team, mate * 2 * size + i * 128)
                total[i : i + 4] = [x + y for x, y in zip(total[i : i + 4], part, strict=True)] if mate else part
        return total
