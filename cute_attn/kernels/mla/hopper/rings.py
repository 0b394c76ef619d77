"""What the producer warpgroup hands over: rings of query rows, in one slot, and of tiles, in two, half by half; and
records of segments.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES
from cute_attn.kernels.mla.smem import HALVES, RECORD_BYTES, HopperMlaMemory
from cute_attn.kernels.xqa.parts.partition import KvSplit, Partition, Segment, Share

PRODUCERS = 128  # threads, each of which arrives at the full barriers
WARPS = 4  # of an MMA warpgroup, each of which arrives at the empty barriers
NO_WORK = -1  # as `begin`: no segments are left


class SegmentRecord(NamedTuple):
    """A CTA's part of a segment, as the producer warpgroup leaves it in shared memory for the MMA warpgroups, which
    then need not know how work is divided, and keep nothing of it in registers."""

    begin: Int32  # tiles
    end: Int32
    whole: Int32  # 1: the part is the whole segment
    kv_len: Int32
    diagonal: Int32  # keys that token 0 sees
    first_row: Int32  # of the query rows
    row_count: Int32
    start_row: Int32
    first_share: Int32  # of those that have a part of the segment
    shares: Int32

    @classmethod
    def of(cls, partition: Partition, segment: Segment, share: Share, split: KvSplit) -> "SegmentRecord":
        p, request = partition.p, segment.request
        rows = partition.rows(segment)
        first = ptx.divide(segment.start, share.size)
        last = ptx.divide(segment.start + request.tiles - 1, share.size)
        return cls(
            begin=split.begin,
            end=split.end,
            whole=ptx.flag(split.whole),
            kv_len=request.kv_len,
            diagonal=request.kv_len - request.qo_len + 1 + p.right,
            first_row=rows.first,
            row_count=rows.count,
            start_row=rows.start,
            first_share=first,
            shares=last - first + 1,
        )

    @classmethod
    def load(cls, address: Int32) -> "SegmentRecord":
        words = [word for i in range(0, RECORD_BYTES, 16) for word in ptx.ld_shared_v4(address, i)]
        return cls(*(cute.arch.make_warp_uniform(word) for word in words[: len(cls._fields)]))

    def store(self, address: Int32) -> None:
        """Write the record, by one thread. Others see it behind the full barrier of Q."""
        words = [*self, *(Int32(0) for _ in range(RECORD_BYTES // 4 - len(self)))]
        for i in range(0, len(words), 4):
            ptx.st_shared_v4(address, 4 * i, words[i : i + 4])

    def rows(self, p: Any) -> PackedRows:
        return PackedRows(self.first_row, self.row_count, p.group, Int32(0), self.start_row)

    def split(self) -> KvSplit:
        return KvSplit(self.begin, self.end, self.whole != 0, Boolean(True))


@dataclass(frozen=True)
class Rings:
    memory: HopperMlaMemory
    base: Int32  # of shared memory

    @property
    def q(self) -> Ring:
        memory = self.memory
        return Ring(1, 0, self.base + Int32(memory.q), self.base + Int32(memory.barriers))

    def record(self, q: PipelineState) -> Int32:
        """Address of the record of a segment. There are two: Q is released before the segment's results are written."""
        return self.base + Int32(self.memory.records) + q.index_phase * RECORD_BYTES

    def half(self, index: Int32 | int) -> Ring:
        """Return the ring of a half of the tiles. Its slots begin where the tiles do."""
        memory = self.memory
        first = self.base + Int32(memory.barriers + 2 * BARRIER_BYTES)
        return Ring(memory.spec.stages, memory.slot_bytes, self.base, first + index * memory.half_barrier_bytes)

    def initialise(self) -> None:
        """For one thread; a CTA barrier must follow. A half is released by the warpgroup whose V operand it is, which
        has then seen P, and so all scores, of the tile."""
        self.q.initialise(PRODUCERS + 1, 2 * WARPS)  # and the record
        for index in range(HALVES):
            self.half(index).initialise(PRODUCERS, WARPS)
        tma.fence_barrier_init()
