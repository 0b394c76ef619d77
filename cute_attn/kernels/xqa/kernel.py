"""Decode over a paged cache on mma.sync, for any GPU since sm_80: K and V move once, at the speed of memory.

    a CTA's share of the work (`partition`)   segment | segment | segment ...
    each warp with its own cp.async ring,     K,V[t + 2] -----> K,V[t + 3] ----->
    no barrier in the main loop               S^T = K Q^T | softmax | O^T += V^T P^T
    the end of a segment (`merge`)            warps merge in shared memory, CTAs in global memory

The MMA operands are swapped: the few query rows are the 8 columns of an instruction, tokens and output dimensions its
16 rows, so that the tensor cores spend little on each token. fp8 and 4-bit elements keep their format in shared memory
and are converted in registers (`formats`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.scalars import shared_memory, warp_index
from cute_attn.kernels.blocks.softmax import Running
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.ahead import EarlyTiles, begins_with_queries, bounded, early_segment
from cute_attn.kernels.xqa.parts.formats import tile_forms
from cute_attn.kernels.xqa.parts.masks import TileMask
from cute_attn.kernels.xqa.parts.pages import PagedKv, TokenPages, page_id
from cute_attn.kernels.xqa.parts.partition import (
    ClusterShares,
    KvSplit,
    Load,
    Partition,
    Segment,
    Share,
    WarpShares,
    WholeSegments,
)
from cute_attn.kernels.xqa.parts.queries import Queries, QueryRows
from cute_attn.kernels.xqa.parts.softmax import ColumnSoftmax, log2_scale
from cute_attn.kernels.xqa.parts.team import HeadWarp, LoneWarp, WarpTeam
from cute_attn.kernels.xqa.parts.tickets import GuessPartition, TicketPartition
from cute_attn.kernels.xqa.parts.warp_merge import ClusterMerge, EvenMerge, HeadMerge, WarpMerge, WholeMerge
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import Work, XqaSpec
from cute_attn.runtime.arch import named


class XqaParams(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64, 0 where absent. Strides count bytes, except that K's and V's
    page and token strides count units of 16 bytes: an offset into the cache then fits 32 bits."""

    q: Int64
    k: Int64
    v: Int64
    o: Int64
    lse: Int64
    k_scales: Int64
    v_scales: Int64
    table: Int64
    page_starts: Int64
    seq_lens: Int64
    q_indptr: Int64
    mask: Int64
    sinks: Int64
    scale0: Int64
    scale1: Int64
    v_scale_ptr: Int64
    partials: Int64
    counters: Int64
    q_stride_n: Int64
    q_stride_h: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    k_stride_h: Int64
    v_stride_h: Int64
    k_scales_stride_h: Int64
    v_scales_stride_h: Int64
    k_stride_page: Int32
    k_stride_n: Int32
    v_stride_page: Int32
    v_stride_n: Int32
    k_scales_stride_page: Int32
    k_scales_stride_n: Int32
    v_scales_stride_page: Int32
    v_scales_stride_n: Int32
    mask_row_bytes: Int32
    batch: Int32
    capacity: Int32
    table_stride: Int32  # elements, unlike the others
    q_len: Int32
    window_left: Int32
    num_kv_heads: Int32
    row_blocks: Divisor
    units_per_cta_group: Int32
    shares_multiplier: Int32
    shares_shift: Int32
    group: Divisor
    page_size: Divisor
    overhead: Int32
    min_share: Int32
    dealt: Int32
    scale: Float32
    v_scale: Float32
    lse_scale: Float32
    entries: Int32  # of the page table; of these two what is read ahead is kept in bounds
    pages: Int32  # of the cache


class LoopState(NamedTuple):
    """State that a warp carries from tile to tile: the accumulators, the ring slot of the next tile to compute, and the
    cache positions of the next tile to copy."""

    running: Running
    slot: Int32
    token_pages: TokenPages


class Start(NamedTuple):
    """A CTA's share and the segment in which it begins, words of this one's queries, and page ids of the first tile
    that is not on its way yet."""

    share: Share
    segment: Segment
    words: list[Int32]
    token_pages: TokenPages


class WarpTiles(NamedTuple):
    """KV tiles of a share's split of a segment that one team of warps processes: `count` tiles from `first`, strided by
    the number of teams."""

    split: KvSplit
    first: Int32
    count: Int32


@dataclass(frozen=True)
class SegmentWork:
    """Everything that a warp needs for one segment."""

    warp_tiles: WarpTiles
    kv: PagedKv
    mask: TileMask
    queries: Queries
    softmax: ColumnSoftmax


class Kind(NamedTuple):
    """How the CTAs of a launch divide its work (`XqaSpec.work`), and what they merge accordingly."""

    partition: type[Partition]
    merge: type[WarpMerge]
    warp: type[LoneWarp] = LoneWarp  # that has all columns


KINDS: dict[Work, Kind] = {
    "shares": Kind(TicketPartition, WarpMerge),
    "even": Kind(WarpShares, EvenMerge, HeadWarp),
    "whole": Kind(WholeSegments, WholeMerge),
    "heads": Kind(WholeSegments, HeadMerge, HeadWarp),
    "cluster": Kind(ClusterShares, ClusterMerge),
}


def make_partition(spec: XqaSpec, p: Any, load: Load = ptx.load_word_if) -> Partition:
    # NVFP4, whose warps compute longest: 64 x 8192 took 4 % longer with the same cuts made by `EvenPartition`
    # (H200).
    if spec.work == "shares" and spec.kv_bits == 4:
        return Partition(p, spec, load=load)
    if spec.work == "shares" and spec.prefetch:
        return GuessPartition(p, spec, load=load)
    return KINDS[spec.work].partition(p, spec, load=load)


class XqaProgram(GridProgram):
    """The decode kernel of one spec, for one architecture."""

    params = XqaParams

    def __init__(self, spec: XqaSpec, arch: str) -> None:
        self.spec = spec
        self.memory = XqaMemory(spec)
        self.merge_type = KINDS[spec.work].merge
        self.team = WarpTeam(spec, self.memory) if spec.team > 1 else KINDS[spec.work].warp()
        self.forms = tile_forms(spec, self.memory, named(arch))
        self.layout, self.reads, self.format = self.forms.layout, self.forms.reads, self.forms.format
        self.block = (32 * spec.warps, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.cluster = (1, spec.cluster_size, 1)
        self.min_ctas = spec.ctas + spec.guests
        self.pdl = named(arch).pdl

    @cute.kernel
    def kernel(self, params: Any) -> None:
        partition = make_partition(self.spec, params)
        self.merge_type.open(self.memory)
        early = None
        if cutlass.const_expr(self.pdl):
            partition.prefetch_lengths()
            if cutlass.const_expr(self.spec.prefetch > 0):
                early = self.read_ahead(params)
            ptx.grid_dependency_wait()
        if cutlass.const_expr(self.pdl and self.spec.whole):
            ptx.grid_dependency_launch()  # at once: the time of a short segment is what the next launch has
        query_rows = QueryRows(self.spec, self.memory, self.team, self.format, params)
        share, segment, words, token_pages = self.start(partition, query_rows, early)
        if cutlass.const_expr(self.pdl and not self.spec.whole):
            ptx.grid_dependency_launch()  # now, so that what the next launch fetches does not delay the first copies
        finish = FinalEpilogue.of(params).scaled(Float32(self.format.dequant_factor))
        scale, turn = log2_scale(params, self.format.dequant_factor), Int32(0)
        while partition.overlaps(segment, share):
            merge = self.merge_type(
                self.spec, params, self.memory, self.team, shared_memory(), finish, self.format, turn
            )
            work = self.segment_work(partition, segment, share, query_rows.operands(words, scale))
            split = work.warp_tiles.split
            merge.enter(split)
            state = LoopState(work.softmax.start(), self.ring_start(), token_pages)
            for i in cutlass.range(0, work.warp_tiles.count, unroll=1):
                state = self.mainloop_step(work, state, i)
            if split.active:
                ptx.sync_warp()  # all lanes are done with the last slots of the ring, which the prologue leaves free
                merge.publish(state.running)
            following = partition.next_segment(segment, share)
            words, token_pages, ticket = query_rows.no_words(), work.kv.no_pages(), Int32(0)
            if partition.overlaps(following, share):
                ticket = partition.draw(share)
                words = query_rows.load(following)
                token_pages = self.load_prologue(partition, following, share)
            rows = partition.rows(segment)
            if split.active:
                merge.sync()
                merge.write(rows, segment, share, split)
                partition.keep(ticket)
                merge.sync()  # before the slots are filled again
            segment, turn = following, turn + 1
        ptx.cp_async_wait(0)

    # --- components -------------------------------------------------------------------------------------------------

    def ring_start(self) -> Int32:
        """Shared address of the first slot of this warp's ring."""
        return shared_memory() + warp_index() * self.memory.ring_bytes

    def warp_tiles(self, partition: Partition, segment: Segment, share: Share) -> WarpTiles:
        split = partition.split(segment, share)
        part = partition.part(split)
        first = part.begin + self.team.number(warp_index())
        count = ptx.maximum(part.end - first + (self.spec.teams - 1), Int32(0)) // self.spec.teams
        return WarpTiles(split, first + segment.request.first_token // self.spec.cols, count)

    def paged_kv(self, partition: Partition, segment: Segment) -> PagedKv:
        p, head = partition.p, partition.head(segment.unit)
        request, page_ids = segment.request, partial(page_id, isa.mad_wide(segment.first_page, Int32(4), p.table))
        return PagedKv(self.memory, self.layout, self.team, p, page_ids, head, request.first_token, request.kv_len)

    def segment_work(self, partition: Partition, segment: Segment, share: Share, queries: Queries) -> SegmentWork:
        rows = partition.rows(segment)
        return SegmentWork(
            warp_tiles=self.warp_tiles(partition, segment, share),
            kv=self.paged_kv(partition, segment),
            mask=TileMask(partition.p, rows, segment, self.spec, self.layout),
            queries=queries,
            softmax=self.forms.softmax(
                self.spec.row_blocks,
                self.memory.loads * self.format.operands_per_load,
                self.team.score_scale(queries.log2_scale),
                self.format.slack,
            ),
        )

    # --- phases -----------------------------------------------------------------------------------------------------

    def kv_tile(self, tiles: WarpTiles, i: Int32 | int) -> Int32:
        return tiles.first + i * self.spec.teams

    def read_ahead(self, p: Any) -> EarlyTiles:
        """Read where this warp's first tiles are before the preceding kernel has ended, and fetch some into L2."""
        # By lengths that may change, with `q_len` queries per request.
        partition = make_partition(self.spec, p._replace(q_indptr=Int64(0)), isa.load_early_if)
        seen = partition.seen()
        share, segment = early_segment(partition.found(seen), p)
        kv = bounded(self.paged_kv(partition, segment), segment, isa.load_early_if)
        tiles = self.warp_tiles(partition, segment, share)
        fetched, copied = self.spec.prefetch, self.memory.prefetch_distance
        token_pages = self.first_page_ids(kv, tiles, max(fetched, copied))
        for i, places in enumerate(token_pages[:fetched]):
            kv.fetch(places, self.kv_tile(tiles, i), i < tiles.count)
        return EarlyTiles(seen, share, segment, token_pages[:copied])

    def start(self, partition: Partition, query_rows: QueryRows, early: EarlyTiles | None) -> Start:
        """Find this CTA's first segment, and start copying its first tiles."""
        if early is None:
            return self.begin(partition, query_rows, partition.first_segment())
        start = self.start_guessed if self.spec.work == "shares" else self.start_early
        return start(partition, query_rows, early)

    def begin(self, partition: Partition, query_rows: QueryRows, found: tuple[Share, Segment]) -> Start:
        """Read the queries of a segment, and start copying its first tiles."""
        share, segment = found
        words = query_rows.load(segment)
        return Start(share, segment, words, self.load_prologue(partition, segment, share))

    @cute.jit
    def start_early(self, partition: cutlass.Constexpr, query_rows: QueryRows, early: EarlyTiles) -> Start:
        """Copy the first tiles by the page ids that were read before the preceding kernel ended. Meanwhile read lengths
        and page ids again, and start anew where any has changed."""
        p, share, segment = partition.p, early.share, early.segment
        seen = partition.seen()
        words, token_pages, following = self.copy_early(partition, query_rows, early)
        if cutlass.or_(early.have_changed(seen, token_pages), begins_with_queries(p)):
            ptx.cp_async_wait(0)
            ptx.sync_warp()
            share, segment, words, following = self.begin(partition, query_rows, partition.found(seen))
        elif p.q_indptr != Int64(0):
            segment = segment._replace(request=partition.request(segment.index))
            words = query_rows.load(segment)
        return Start(share, segment, words, following)

    @cute.jit
    def start_guessed(self, partition: cutlass.Constexpr, query_rows: QueryRows, early: EarlyTiles) -> Start:
        """Copy the first tiles of the segment that this CTA has if all are short. Meanwhile read all lengths, and start
        anew where one is not, or this one has changed."""
        share, segment, words, right = early.share, early.segment, query_rows.no_words(), Boolean(False)
        following = self.paged_kv(partition, segment).no_pages()
        if partition.may_be_right(segment):
            seen, lengths = partition.seen(), partition.lengths()
            words, token_pages, following = self.copy_early(partition, query_rows, early)
            same = cutlass.not_(early.have_changed(seen, token_pages))
            right = isa.all_of([partition.are_short(lengths), same])
        if cutlass.not_(right):
            ptx.cp_async_wait(0)
            ptx.sync_warp()
            share, segment, words, following = self.begin(partition, query_rows, partition.first_segment())
        return Start(share, segment, words, following)

    def copy_early(
        self, partition: Partition, query_rows: QueryRows, early: EarlyTiles
    ) -> tuple[list[Int32], list[TokenPages], TokenPages]:
        """Copy the first tiles by the page ids that were read before the preceding kernel ended, and read Q, these page
        ids again, and those of the tile that follows."""
        share, segment = early.share, early.segment
        words, tiles = query_rows.load(segment), self.warp_tiles(partition, segment, share)
        kv = bounded(self.paged_kv(partition, segment), segment, ptx.load_word_if)
        *token_pages, following = self.first_page_ids(kv, tiles, self.memory.prefetch_distance + 1)
        self.copy_first_tiles(kv, tiles, early.token_pages)
        return words, token_pages, following

    def load_prologue(self, partition: Partition, segment: Segment, share: Share) -> TokenPages:
        """Start copying the first tiles of a segment. Returns the page ids of the tile that follows."""
        kv, tiles = self.paged_kv(partition, segment), self.warp_tiles(partition, segment, share)
        *token_pages, following = self.first_page_ids(kv, tiles, self.memory.prefetch_distance + 1)
        self.copy_first_tiles(kv, tiles, token_pages)
        return following

    def first_page_ids(self, kv: PagedKv, tiles: WarpTiles, count: int) -> list[TokenPages]:
        """Page ids of the first `count` tiles."""
        return [kv.prefetch_page_ids(self.kv_tile(tiles, i), i < tiles.count) for i in range(count)]

    def copy_first_tiles(self, kv: PagedKv, tiles: WarpTiles, token_pages: list[TokenPages]) -> None:
        """Start copying the first tiles, one cp.async group per tile. Empty groups are committed too, so that counting
        groups counts tiles."""
        ptx.sync_warp()  # keeps loads of Q and of page ids before the copies, behind which they would wait
        for i in range(self.memory.prefetch_distance):
            slot = self.ring_start() + i * self.memory.slot_bytes
            for _ in kv.copies(token_pages[i], self.kv_tile(tiles, i), i < tiles.count, slot):
                pass
            ptx.cp_async_commit()

    @cute.jit
    def mainloop_step(self, work: SegmentWork, state: LoopState, i: Int32) -> LoopState:
        """Process one tile: wait for it, compute S^T while copying the tile `ahead` later, then softmax and O^T."""
        ahead, tiles = self.memory.prefetch_distance, work.warp_tiles
        ptx.cp_async_wait(ahead - 1)
        ptx.sync_warp()  # makes the tile visible; every lane is also done with the slot filled next
        next_copy, wanted = self.kv_tile(tiles, i + ahead), i + ahead < tiles.count
        copies = work.kv.copies(state.token_pages, next_copy, wanted, self.advance(state.slot, ahead))
        s = self.gemm_qk(work.queries, state.slot, copies, work.kv.copy_steps)
        ptx.cp_async_commit()
        token_pages = work.kv.prefetch_page_ids(self.kv_tile(tiles, i + ahead + 1), i + ahead + 1 < tiles.count)
        s = self.team.total_scores(s, work.queries.log2_scale, i)
        start = self.kv_tile(tiles, i) * self.spec.cols
        if work.mask.masks_part_of(start):
            s = work.mask.apply(s, start)
        running = work.softmax.rescale_if_needed(state.running, s)
        p = work.softmax.exponentials(s, running.shift)
        total = work.softmax.sums(p, running.total)
        out = self.gemm_pv(running.out, p, state.slot)
        return LoopState(Running(out, running.shift, total), self.advance(state.slot, 1), token_pages)

    def advance(self, slot: Int32, steps: int) -> Int32:
        moved = slot + Int32(steps * self.memory.slot_bytes)
        return ptx.select(moved >= self.ring_start() + self.memory.ring_bytes, moved - self.memory.ring_bytes, moved)

    # --- matrix products --------------------------------------------------------------------------------------------

    def gemm_qk(self, queries: Queries, slot: Int32, copies: Any, count: int) -> list[Float32]:
        memory, blocks, reads = self.memory, self.spec.row_blocks, self.reads
        at = reads.k_address(slot)
        acc = [Float32(0.0) for _ in range(4 * blocks * (memory.spec.cols // 16))]
        scales = [self.format.k_scales(slot, m) for m in range(memory.spec.cols // 16)]
        done = 0
        for i, turn in enumerate(reads.k_turns):
            for group, m in turn:
                operands = self.format.k_operands(reads.k_words(at, group, m), group, scales[m])
                for u, a in enumerate(operands):
                    step = group * len(operands) + u
                    for block in range(blocks):
                        self._mma(acc, m * blocks + block, a, queries.fragments[block][step])
            while done < count * (i + 1) // len(reads.k_turns):
                next(copies)
                done += 1
        return acc

    def gemm_pv(self, out: list[Float32], p: list[Float32], slot: Int32) -> list[Float32]:
        memory, blocks, reads = self.memory, self.spec.row_blocks, self.reads
        at = reads.v_address(slot)
        acc, scales_of = list(out), self.format.v_scales(slot)
        for m in range(memory.spec.cols // 16):
            b = [self._p_operand(p, m * blocks + block) for block in range(blocks)]
            scales = scales_of(m)
            for group in range(reads.groups):
                operands = self.format.v_operands(reads.v_words(at, group, m), group, scales)
                for u, a in enumerate(operands):
                    tile = group * len(operands) + u
                    p_scaled = self.format.p_operands(b, tile, scales)
                    for block in range(blocks):
                        self._mma(acc, tile * blocks + block, a, p_scaled[block])
        return acc

    def _p_operand(self, p: list[Float32], index: int) -> list[Int32]:
        """P^T as a B operand: one transposed 8x8 matrix for each half of the 16 tokens."""
        four = p[4 * index : 4 * index + 4]
        pairs = [isa.movmatrix(ptx.pack_16(self.spec.mma_dtype, four[j], four[j + 1])) for j in (0, 2)]
        return self.format.p_tokens(pairs)

    def _mma(self, acc: list[Float32], index: int, a: list[Int32], b: list[Int32]) -> None:
        i, dtype = 4 * index, self.spec.mma_dtype
        acc[i : i + 4] = ptx.mma(dtype, dtype, a, b, acc[i : i + 4])
