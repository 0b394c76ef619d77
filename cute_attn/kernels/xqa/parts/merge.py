"""Merge of softmax states: the accumulators of a CTA's warps, and of all CTAs of a segment, become output rows.

The warps of a CTA, or its teams of warps, process different tokens of the same rows. Each warp stores its (maximum,
sum, outputs) in shared memory, then every thread merges a vector of a row over all warps that have its columns. A CTA
that processes only one KV split of a segment writes the result as a partial to global memory. The CTA that arrives last
merges all partials, every thread some vectors of a row. Of many splits, each group is merged by the last of its CTAs
into one more partial, and the last of these CTAs merges those. The order of additions depends on lengths alone, not on
timing, so results are deterministic.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, store_numbers
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import warp_index
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.partition import KvSplit, Segment, Share
from cute_attn.kernels.xqa.parts.team import LoneWarp, WarpTeam
from cute_attn.kernels.xqa.spec import DecodeSpec

VECTOR_WIDTH = 4  # output dims that a thread merges at once
GROUP_BITS = 3
GROUP, MOST_TOGETHER = 1 << GROUP_BITS, 31  # partials of a group, and the most that are not divided into groups


class Parts(NamedTuple):
    """Partials that one CTA merges: of `count` of a segment's splits, every 2^`bits`-th from number `begin` on, or of
    the groups that begin with these."""

    share: Int32  # of the CTA that has the segment's first split
    begin: Int32
    count: Int32
    bits: Int32


class SoftmaxState(NamedTuple):
    """State of one row: maximum in log2 units, sum of exp2(score - maximum), some unnormalised outputs."""

    maximum: Float32
    total: Float32
    values: list[Float32]

    @classmethod
    def empty(cls, count: int) -> "SoftmaxState":
        """The state of no tokens."""
        return cls(Float32(ptx.NEG_INF), Float32(0.0), [Float32(0.0) for _ in range(count)])


def rescale_factor(maximum: Float32, new: Float32) -> Float32:
    """Factor that rescales a state from its own maximum to `new`; 0 where neither has seen a token."""
    return ptx.exp2(maximum - ptx.select(new == Float32(ptx.NEG_INF), Float32(0.0), new))


def merge_states(parts: list[SoftmaxState]) -> SoftmaxState:
    maximum = reduce(ptx.fmax, [part.maximum for part in parts])
    total, values = Float32(0.0), [Float32(0.0) for _ in range(VECTOR_WIDTH)]
    for part in parts:
        factor = rescale_factor(part.maximum, maximum)
        total = ptx.fma(part.total, factor, total)
        values = [ptx.fma(x, factor, value) for x, value in zip(part.values, values, strict=True)]
    return SoftmaxState(maximum, total, values)


@dataclass(frozen=True)
class Merge:
    """Merge of one segment's warps and KV splits, and its epilogue."""

    spec: DecodeSpec
    p: Any  # XqaParams or MlaParams
    memory: Any  # XqaMemory, or a map of one state that has its tile_dim, ring_bytes, outputs, stats and ticket
    team: LoneWarp | WarpTeam
    base: Int32  # shared memory
    finish: FinalEpilogue

    @property
    def share_number(self) -> Int32:
        """Number of this CTA's share."""
        return cute.arch.block_idx()[1]

    @property
    def vectors_per_row(self) -> int:
        """Vectors of a state's columns of a row, padding included."""
        return self.memory.tile_dim // VECTOR_WIDTH

    # --- states of a CTA --------------------------------------------------------------------------------------------

    @property
    def states(self) -> range:
        """Numbers of the states that have this thread's columns, or of those of the first warp of its team."""
        raise NotImplementedError

    @property
    def lanes(self) -> int:
        """Threads that have one state: those of a warp."""
        return 32

    @property
    def column_threads(self) -> int:
        """Threads that have the same columns."""
        return self.lanes * self.spec.teams

    def enter(self, split: KvSplit) -> None:
        """What must precede the tiles of a segment."""

    def collect(self, rows: PackedRows) -> None:
        """Exchange states with the CTAs that have other tiles of the same share."""

    def sync(self) -> None:
        """Barrier of all threads that merge a segment."""
        ptx.sync_threads()

    def sync_cta(self) -> None:
        """Barrier of all threads that merge at the same time."""
        self.sync()

    def swizzled_dim(self, dim: Int32, row: Int32) -> Int32:
        """XOR dims with bits of the row: the lanes of a quad store rows 2t, 2t + 1 and must differ in bank."""
        return dim ^ ((row >> 1 & 3) << 3)

    def merge_warps(self, row: Int32, dim: Int32) -> SoftmaxState:
        """Merge the states of the CTA for one vector of a row."""
        parts, stats_bytes = [], self.spec.rows * 8
        for warp in self.states:
            stats = self.team.shifted(self.base + self.memory.stats + row * 8, stats_bytes)
            maximum, total = ptx.ld_shared_v2_f32(stats, warp * stats_bytes)
            at = self.base + row * (self.memory.tile_dim * 4) + self.swizzled_dim(dim, row) * 4
            at = self.team.shifted(at, self.memory.ring_bytes)
            values = ptx.ld_shared_v4_f32(at, warp * self.memory.ring_bytes + self.memory.outputs)
            parts.append(SoftmaxState(maximum, total, values))
        return merge_states(parts)

    def has_columns(self, dim: Int32) -> Boolean | bool:
        """Whether a vector is no padding."""
        return True

    def with_columns(self, exists: Boolean, dim: Int32) -> Boolean:
        """Whether a vector exists and is no padding."""
        columns = self.has_columns(dim)
        return exists if columns is True else isa.all_of([exists, columns])

    def head_dim(self, dim: Int32) -> Int32:
        """Dimension of the head at dimension `dim` of this state."""
        return dim

    # --- output -----------------------------------------------------------------------------------------------------

    @cute.jit
    def write(self, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        """Write outputs, or this CTA's partial, by all threads. A barrier after `publish` must come before."""
        thread, threads = self.team.thread(), self.column_threads
        first = ptx.divide(segment.start, share.size)
        last = ptx.divide(segment.start + segment.request.tiles - 1, share.size)
        # Computed here, not after the barriers, where every thread would wait for the divisions.
        first, count = ptx.opaque(first), ptx.opaque(last - first + 1)
        self.collect(rows)
        begin, end = self.vectors(rows)
        for item in cutlass.range(begin + thread, end, threads, unroll=1):
            row, dim = self.row_and_dim(item)
            if self.has_columns(dim):
                result = self.merged(row, dim)
                if split.whole:
                    self.store(rows, row, self.head_dim(dim), result)
                else:
                    self.store_partial(self.partial_index(split), row, self.head_dim(dim), result)
        if cutlass.not_(split.whole):
            self.merge_splits(rows, first, count)

    def merged(self, row: Int32, dim: Int32) -> SoftmaxState:
        """One vector of a row, of all tiles of the share."""
        return self.merge_warps(row, dim)

    def vectors(self, rows: PackedRows) -> tuple[Int32 | int, Int32]:
        """First of the vectors of rows that exist that this warp's columns have and this CTA writes, and their end."""
        return 0, self.num_vectors(rows)

    def num_vectors(self, rows: PackedRows) -> Int32:
        """Number of vectors of this warp's columns in the rows that exist."""
        return ptx.minimum(rows.count - rows.first, Int32(self.spec.rows)) * self.vectors_per_row

    @cute.jit
    def store(self, rows: PackedRows, row: Int32, dim: Int32, result: SoftmaxState) -> None:
        p = self.p
        factor, lse = self.finish.row(result.maximum, result.total, rows.head(row))
        if cutlass.and_(dim == 0, p.lse != Int64(0)):
            ptx.st_global_f32(rows.lse_address(p.lse, row, p.num_kv_heads * p.group.value), 0, lse)
        self.store_values(rows, row, dim, [x * factor for x in result.values])

    def store_values(self, rows: PackedRows, row: Int32, dim: Int32, values: list[Float32]) -> None:
        """Store adjacent outputs of a row."""
        p, size = self.p, 1 if self.spec.out_dtype == "float8_e4m3fn" else 2
        place = rows.address(p.o, row, p.o_stride_n, p.o_stride_h)
        store_numbers(self.spec.out_dtype, place + Int64(dim * size), 0, values)

    # --- KV splits of a segment: partial results of all CTAs in global memory, and their counters --------------------

    def cta_index(self, share: Int32) -> Int32:
        """Linear index of the CTA that has share number `share` in this CTA's group."""
        return share * cute.arch.grid_dim()[0] + cute.arch.block_idx()[0]

    def partial_address(self, partial: Int32, row: Int32) -> tuple[Int64, Int64]:
        """Addresses of a partial's (maximum, sum) and outputs for one row."""
        index = Int64(partial) * Int64(self.spec.rows) + Int64(row)
        ctas = cute.arch.grid_dim()[0] * cute.arch.grid_dim()[1]
        outputs = self.p.partials + Int64(ctas * (2 * self.spec.heads * self.spec.rows * 8))
        return self.p.partials + index * Int64(8), outputs + index * Int64(self.spec.head_dim * 4)

    def counter_address(self, share: Int32) -> Int64:
        """Address of the counter of the CTA that has share number `share`."""
        return self.p.counters + Int64(self.cta_index(share)) * Int64(4)

    def partial_index(self, split: KvSplit) -> Int32:
        """Index of a split's partial."""
        return self.partial_of(self.share_number, split.begin)

    def partial_of_part(self, parts: Parts, index: Int32) -> Int32:
        """Index of the `index`-th partial of some parts. That of a group lies where a later CTA of it, which neither
        begins nor ends a segment, would leave that of a segment that it begins."""
        number, groups = parts.begin + (index << parts.bits), parts.bits > 0
        share = parts.share + number + ptx.select(groups, parts.bits - (GROUP_BITS - 1), Int32(0))
        return self.partial_of(share, ptx.select(groups, Int32(0), number))

    def partial_of(self, share: Int32, before: Int32) -> Int32:
        """Index of a partial of the CTA that has share number `share` in this CTA's group, of this warp's unit where
        each has its own. There are two: one for a segment that the CTA begins and another CTA ends, which has nothing
        `before`, one for a segment that another CTA began."""
        index = self.cta_index(share)
        if self.spec.heads > 1:
            index = index * self.spec.heads + warp_index()
        return index * 2 + ptx.flag(before == 0)

    def is_first(self, row: Int32, dim: Int32) -> Boolean:
        """Whether a vector is the first of its row that this CTA writes."""
        return dim == 0

    @cute.jit
    def store_partial(self, partial: Int32, row: Int32, dim: Int32, result: SoftmaxState) -> None:
        stats, outputs = self.partial_address(partial, row)
        if self.is_first(row, dim):
            ptx.st_global_v2_f32(stats, 0, [result.maximum, result.total])
        ptx.st_global_v4_f32(outputs + Int64(dim * 4), 0, result.values)

    @cute.jit
    def arrive(self, counter: Int64) -> Int32:
        """Count this CTA as done, by all threads that merge; return how many were before it."""
        ticket = self.base + Int32(self.memory.ticket)
        self.sync_cta()
        if cute.arch.thread_idx()[0] == 0:
            ptx.st_shared_b32(ticket, 0, isa.add_arrival(counter))
        self.sync_cta()
        return ptx.ld_shared_b32(ticket)

    @cute.jit
    def reset(self, counter: Int64) -> None:
        """Set a counter to 0 for the next launch."""
        if cute.arch.thread_idx()[0] == 0:
            ptx.st_global_b32(counter, 0, Int32(0))

    @cute.jit
    def merge_splits(self, rows: PackedRows, first: Int32, count: Int32) -> None:
        """Count this CTA as done with its split, one of `count` in the CTAs from share `first` on. The last CTA of a
        group merges its partials, and the last of all these writes the outputs.

        A group counts at the CTA of its first split, one of groups three CTAs on: no other cut segment begins there.
        """
        bits, going = Int32(0), Boolean(True)
        while going:
            groups = self.groups(count)
            group = ptx.minimum(self.share_number - first >> bits + GROUP_BITS, groups - 1)
            begin = group << GROUP_BITS
            size = ptx.select(group == groups - 1, count - begin, Int32(GROUP))  # the last also has what is left over
            parts = Parts(first, begin << bits, size, bits)
            counter = self.counter_address(first + parts.begin + bits)
            going = self.arrive(counter) == size - 1
            if going:
                self.reset(counter)
                going = groups > 1
                self.merge_partials(rows, parts, going)
            count, bits = groups, bits + GROUP_BITS

    def groups(self, count: Int32) -> Int32:
        """Number of groups of so many partials."""
        return ptx.select(count > MOST_TOGETHER, count >> GROUP_BITS, Int32(1))

    @property
    def vectors_in_flight(self) -> int:
        """Vectors of partials that a thread loads at once, at most."""
        raise NotImplementedError

    @cute.jit
    def merge_partials(self, rows: PackedRows, parts: Parts, more: Boolean) -> None:
        """Merge partials, into outputs or, if there are `more` groups of them, into the partial of this group."""
        total = self.spec.rows * self.vectors_per_row
        most = min(4, self.vectors_in_flight)
        vectors = max(n for n in range(1, most + 1) if n == 1 or total % (self.column_threads * n) == 0)
        group = parts._replace(bits=parts.bits + GROUP_BITS)
        for start in cutlass.range(self.team.thread(), self.num_vectors(rows), self.column_threads * vectors, unroll=1):
            places = [self.row_and_dim(start + self.column_threads * i) for i in range(vectors)]
            sums = [SoftmaxState.empty(VECTOR_WIDTH)] * vectors
            for index in cutlass.range(0, parts.count, unroll=max(1, self.vectors_in_flight // vectors)):
                partial = self.partial_of_part(parts, index)
                loaded = [self.load_partial(partial, rows, row, dim) for row, dim in places]
                sums = [merge_states([old, new]) for old, new in zip(sums, loaded, strict=True)]
            for i in cutlass.range_constexpr(vectors):
                row, dim = places[i]
                if self.with_columns(rows.exists(row), dim):
                    if more:
                        self.store_partial(self.partial_of_part(group, Int32(0)), row, self.head_dim(dim), sums[i])
                    else:
                        self.store(rows, row, self.head_dim(dim), sums[i])

    def row_and_dim(self, index: Int32) -> tuple[Int32, Int32]:
        return index // self.vectors_per_row, index % self.vectors_per_row * VECTOR_WIDTH

    def load_partial(
        self, partial: Int32, rows: PackedRows, row: Int32, dim: Int32, wanted: Boolean | None = None
    ) -> SoftmaxState:
        """Load a vector of a partial; where it is not `wanted`, or else its row does not exist, an empty state."""
        stats, outputs = self.partial_address(partial, row)
        exists = rows.exists(row) if wanted is None else wanted
        maximum, total = isa.ld_l2_if(exists, stats, 2)
        maximum = ptx.select(exists, maximum, Float32(ptx.NEG_INF))
        exists = self.with_columns(exists, dim)
        return SoftmaxState(maximum, total, isa.ld_l2_if(exists, outputs + Int64(self.head_dim(dim) * 4), 4))


@dataclass(frozen=True)
class StateMerge(Merge):
    """Merge where all warps of a CTA have one state, which lies in shared memory: by `threads` threads from the first
    of the CTA, which meet at a named barrier."""

    barrier: int
    threads: int

    @property
    def states(self) -> range:
        return range(1)

    @property
    def lanes(self) -> int:
        return self.threads

    def sync(self) -> None:
        tma.named_sync(Int32(self.barrier), self.threads)

    @property
    def vectors_in_flight(self) -> int:
        return 4
