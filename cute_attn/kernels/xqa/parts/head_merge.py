"""End of segments that one warp processes alone, or of which it alone has a CTA's part: its state becomes output rows
without other warps; where no segment is cut, without barriers of the CTA.

Outputs go through the warp's own slots in shared memory, from where each lane stores eight dims of a row at once. The
factor of a row, for which its sink is read, is found by one lane.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment, Share
from cute_attn.kernels.xqa.parts.warp_merge import WholeMerge

STORED_DIMS = 8  # of a row, stored by a lane at once: 16 bytes, or 8 of e4m3


@dataclass(frozen=True)
class HeadMerge(WholeMerge):
    """Outputs of one warp, which `publish` has stored in shared memory."""

    def sync(self) -> None:
        ptx.sync_warp()

    def places(self) -> list[tuple[Int32, Int32]]:
        """Row and dimension of the outputs that this lane stores, `STORED_DIMS` at once."""
        per_row = self.spec.tile_dim // STORED_DIMS
        items = [first + self.team.thread() for first in range(0, self.spec.rows * per_row, 32)]
        return [(item // per_row, item % per_row * STORED_DIMS) for item in items]

    def wanted(self, rows: PackedRows, row: Int32, dim: Int32) -> Boolean:
        """Whether a place has outputs of a row that exists."""
        exists, columns = rows.exists(row), self.has_columns(dim)
        return exists if columns is True else isa.all_of([exists, columns])

    @cute.jit
    def store_rows(self, rows: PackedRows) -> None:
        factor = self.finish_row(rows, ptx.minimum(self.team.thread(), Int32(self.spec.rows - 1)))
        places = self.places()
        values = [self.outputs(row, dim) for row, dim in places]
        for i in cutlass.range_constexpr(len(places)):
            row, dim = places[i]
            scale = ptx.shuffle_from(factor, row)
            if self.wanted(rows, row, dim):
                self.store_dims(rows, row, dim, [x * scale for x in values[i]])

    @cute.jit
    def finish_row(self, rows: PackedRows, row: Int32) -> Float32:
        """Store a row's lse; return the factor of its outputs. Lanes beyond the last row repeat it."""
        head = rows.head(row)
        maximum, total = self.row_state(row)
        factor, lse = self.finish.row(maximum, total, head)
        if isa.all_of([rows.exists(row), self.team.thread() < self.spec.rows, self.p.lse != Int64(0)]):
            ptx.st_global_f32(self.lse_address(rows, row, head), 0, lse)
        return factor

    def row_state(self, row: Int32) -> list[Float32]:
        """Maximum and sum of a row."""
        stats = self.base + self.memory.stats + warp_index() * (self.memory.rows * 8)
        return ptx.ld_shared_v2_f32(stats + row * 8)

    def outputs(self, row: Int32, dim: Int32) -> list[Float32]:
        """Adjacent outputs of a row; the swizzle keeps eight together."""
        ring = self.base + warp_index() * self.memory.ring_bytes
        at = ring + row * (self.spec.tile_dim * 4) + self.swizzled_dim(dim, row) * 4
        return [x for half in (0, 16) for x in ptx.ld_shared_v4_f32(at, self.memory.outputs + half)]

    def store_dims(self, rows: PackedRows, row: Int32, dim: Int32, values: list[Float32]) -> None:
        """Store adjacent outputs of a row."""
        p = self.p
        place = rows.address(p.o, row, p.o_stride_n, p.o_stride_h)
        if self.spec.out_dtype == "float8_e4m3fn":
            pairs = [isa.to_e4m3_pair(*values[i : i + 2]) for i in range(0, STORED_DIMS, 2)]
            words = [ptx.permute(pairs[i], pairs[i + 1], 0x5410) for i in (0, 2)]
            ptx.st_global_v2(place + Int64(dim), 0, words)
        else:
            ptx.st_global_v4(place + Int64(dim * 2), 0, ptx.pack_pairs(self.spec.out_dtype, values))


@dataclass(frozen=True)
class EvenMerge(HeadMerge):
    """Merge where other CTAs may have parts of a warp's segment. All warps of a CTA have the same part of theirs: it
    counts arrivals once."""

    def sync_cta(self) -> None:
        ptx.sync_threads()

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write outputs, or this warp's partial, by its lanes. `sync` after `publish` must come before."""
        if split.whole:
            self.store_rows(rows)
        else:
            first = ptx.divide(segment.start, share.size)
            last = ptx.divide(segment.start + segment.request.tiles - 1, share.size)
            self.store_part(rows, self.partial_index(split))
            self.merge_splits(rows, first, last - first + 1)

    @cute.jit
    def store_part(self, rows: PackedRows, partial: Int32) -> None:
        """Store the warp's state as a partial."""
        lane = self.team.thread()
        row = ptx.minimum(lane, Int32(self.spec.rows - 1))
        state = self.row_state(row)
        if cutlass.and_(rows.exists(row), lane < self.spec.rows):
            stats, _ = self.partial_address(partial, row)
            ptx.st_global_v2_f32(stats, 0, state)
        places = self.places()
        for i in cutlass.range_constexpr(len(places)):
            row, dim = places[i]
            values = self.outputs(row, dim)
            if self.wanted(rows, row, dim):
                self.store_state(partial, row, dim, values)

    def store_state(self, partial: Int32, row: Int32, dim: Int32, values: list[Float32]) -> None:
        """Store adjacent outputs of a row of a partial."""
        _, outputs = self.partial_address(partial, row)
        for first in range(0, STORED_DIMS, 4):
            ptx.st_global_v4_f32(outputs + Int64(dim * 4), 4 * first, values[first : first + 4])
