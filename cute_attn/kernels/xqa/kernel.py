"""Decode over a paged cache on mma.sync, for any GPU since sm_80: K and V move once, at the speed of memory.

    share of a line (`partition`)      segment | segment | segment ...
    every warp, its own cp.async ring  K,V[t + 2] -----> K,V[t + 3] ----->
    and no barrier in the loop         S^T = K Q^T | softmax | O^T += V^T P^T
    at a segment's end (`merge`)       warps, through shared memory; parts of other CTAs, through global memory

Few query rows are the 8 columns of an instruction, tokens and output dimensions its 16 rows, so that one token costs
the tensor cores little; fp8 and 4-bit elements stay what they are until they are in registers (`formats`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.scalars import device_scale, shared_memory, zeros
from cute_attn.kernels.blocks.smem import swizzled_offset
from cute_attn.kernels.xqa.parts import formats
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.masks import DraftMask
from cute_attn.kernels.xqa.parts.merge import Merge
from cute_attn.kernels.xqa.parts.pages import CHUNK, Located, PagedTile, place
from cute_attn.kernels.xqa.parts.partition import Part, Partition, Segment, Share, part
from cute_attn.kernels.xqa.parts.queries import Queries, QueryRows
from cute_attn.kernels.xqa.parts.softmax import ColumnSoftmax, Running
from cute_attn.kernels.xqa.spec import XqaMemory, XqaSpec
from cute_attn.runtime.arch import named


class XqaParams(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64, 0 where absent; strides are bytes, of K's and V's
    pages and tokens 16 of them: a place in a cache is then a number of 32 bits."""

    q: Int64
    k: Int64
    v: Int64
    o: Int64
    lse: Int64
    k_sf: Int64
    v_sf: Int64
    table: Int64
    page_starts: Int64
    seq_lens: Int64
    q_indptr: Int64
    mask: Int64
    sinks: Int64
    scale_ptr: Int64
    more_scale_ptr: Int64
    v_scale_ptr: Int64
    partials: Int64
    counters: Int64
    q_stride_n: Int64
    q_stride_h: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    k_stride_h: Int64
    v_stride_h: Int64
    k_sf_stride_h: Int64
    v_sf_stride_h: Int64
    k_stride_page: Int32
    k_stride_n: Int32
    v_stride_page: Int32
    v_stride_n: Int32
    k_sf_stride_page: Int32
    k_sf_stride_n: Int32
    v_sf_stride_page: Int32
    v_sf_stride_n: Int32
    mask_row_bytes: Int32
    batch: Int32
    capacity: Int32
    table_stride: Int32  # elements, unlike the others
    q_len: Int32
    window_left: Int32
    num_kv_heads: Int32
    row_blocks: Int32
    row_blocks_multiplier: Int32
    row_blocks_shift: Int32
    line_units: Int32
    shares_multiplier: Int32
    shares_shift: Int32
    group: Int32
    group_multiplier: Int32
    group_shift: Int32
    page_size: Int32
    page_multiplier: Int32
    page_shift: Int32
    overhead: Int32
    min_share: Int32
    scale: Float32
    v_scale: Float32
    lse_scale: Float32


class State(NamedTuple):
    """Carried over a warp's tiles: what is accumulated, the ring slot of the next tile, and where the tokens lie of
    the tile that is copied next."""

    running: Running
    slot: Int32
    located: Located


class Stretch(NamedTuple):
    """A warp's tiles of a segment: `count` of them from `first`, as many apart as the CTA has warps."""

    part: Part
    first: Int32
    count: Int32


@dataclass(frozen=True)
class Work:
    """What a warp needs for one segment."""

    stretch: Stretch
    tile: PagedTile
    mask: DraftMask
    queries: Queries
    softmax: ColumnSoftmax


class XqaProgram:
    params = XqaParams

    def __init__(self, spec: XqaSpec, arch: str) -> None:
        self.spec = spec
        self.memory = XqaMemory.of(spec)
        self.format = formats.make(spec, native=named(arch).capability >= (8, 9))
        self.block = (32 * spec.warps, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.pdl = named(arch).pdl

    def compile_args(self) -> tuple[Any, ...]:
        return (zeros(XqaParams), Int32(1), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, params: XqaParams, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        grid, block = [grid_x, grid_y, grid_z], list(self.block)
        self.kernel(params).launch(
            grid=grid,
            block=block,
            smem=self.smem_bytes,
            min_blocks_per_mp=self.spec.ctas + self.spec.guests,
            preferred_smem_carveout=100,  # or the DSL asks a driver what to prefer
        )

    @cute.kernel
    def kernel(self, params: XqaParams) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        partition = Partition(params, self.spec.cols)
        share, segment = partition.locate()
        merge, query_rows = self.compose(params)
        words = query_rows.fetch(segment)
        located = self.fill(self.tile(params, segment), self.stretch(segment, share))
        while partition.reaches(segment, share):
            work = self.work(params, segment, share, query_rows.operands(words), query_rows.rows(segment))
            state = State(work.softmax.start(), self.ring(), located)
            for i in cutlass.range(0, work.stretch.count, unroll=1):
                state = self.step(work, state, i)
            self.publish(merge, work.stretch.part, state.running)
            following = partition.after(segment)
            words, located = query_rows.nothing(), work.tile.nowhere()
            if partition.reaches(following, share):
                words = query_rows.fetch(following)
                located = self.fill(self.tile(params, following), self.stretch(following, share))
            self.conclude(merge, query_rows.rows(segment), segment, share, work.stretch.part)
            segment = following
        ptx.cp_async_wait(0)

    # --- composition ------------------------------------------------------------------------------------------------

    def compose(self, p: XqaParams) -> tuple[Merge, QueryRows]:
        device_scales = device_scale(p.scale_ptr) * device_scale(p.more_scale_ptr)
        scale = p.scale * device_scales * Float32(ptx.LOG2E * self.format.factor)
        v_scale = p.v_scale * device_scale(p.v_scale_ptr) * Float32(self.format.factor)
        finish = FinalEpilogue(p.sinks, v_scale, p.lse_scale)
        merge = Merge(self.spec, self.memory, self.format, p, shared_memory(), finish)
        return merge, QueryRows(self.spec, p, scale)

    def ring(self) -> Int32:
        """The first slot of this warp's ring."""
        return shared_memory() + self.warp() * self.memory.ring_bytes

    def warp(self) -> Int32:
        return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] >> 5)

    def stretch(self, segment: Segment, share: Share) -> Stretch:
        mine = part(segment, share)
        first = mine.begin + self.warp()
        count = ptx.maximum(mine.end - first + (self.spec.warps - 1), Int32(0)) // self.spec.warps
        return Stretch(mine, first + segment.request.first_token // self.spec.cols, count)

    def tile(self, p: XqaParams, segment: Segment) -> PagedTile:
        head = Divisor(p.row_blocks, p.row_blocks_multiplier, p.row_blocks_shift).quotient(segment.unit)
        table = isa.mad_wide(segment.first_page, Int32(4), p.table)
        return PagedTile(self.memory, p, table, head, segment.request.first_token, segment.request.kv_len)

    def work(self, p: XqaParams, segment: Segment, share: Share, queries: Queries, rows: PackedRows) -> Work:
        return Work(
            stretch=self.stretch(segment, share),
            tile=self.tile(p, segment),
            mask=DraftMask(p, rows, segment, self.spec),
            queries=queries,
            softmax=ColumnSoftmax(
                self.spec.row_blocks, self.spec.head_dim // 16, queries.log2_scale, self.format.slack
            ),
        )

    # --- phases -----------------------------------------------------------------------------------------------------

    def kv_tile(self, stretch: Stretch, i: Int32 | int) -> Int32:
        return stretch.first + i * self.spec.warps

    def fill(self, tile: PagedTile, stretch: Stretch) -> Located:
        """The first tiles of a segment, one cp.async group each; groups are committed even if empty."""
        ahead = self.memory.ahead
        numbers = [self.kv_tile(stretch, i) for i in range(ahead + 1)]
        located = [tile.locate(number, i < stretch.count) for i, number in enumerate(numbers)]
        for i in range(ahead):
            slot = self.ring() + i * self.memory.slot_bytes
            for _ in tile.copies(located[i], numbers[i], i < stretch.count, slot):
                pass
            ptx.cp_async_commit()
        return located[ahead]

    @cute.jit
    def step(self, work: Work, state: State, i: Int32) -> State:
        """One tile: wait for it, S^T while starting the copies of the tile `ahead` further, softmax, O^T."""
        ahead, stretch = self.memory.ahead, work.stretch
        ptx.cp_async_wait(ahead - 1)
        ptx.sync_warp()  # the tile is visible, and every lane has left the slot that is filled next
        further_tile, wanted = self.kv_tile(stretch, i + ahead), i + ahead < stretch.count
        copies = work.tile.copies(state.located, further_tile, wanted, self.advance(state.slot, ahead))
        s = self.scores(work.queries, state.slot, copies, work.tile.count)
        ptx.cp_async_commit()
        located = work.tile.locate(self.kv_tile(stretch, i + ahead + 1), i + ahead + 1 < stretch.count)
        start = self.kv_tile(stretch, i) * self.spec.cols
        if work.mask.cuts(start):
            s = work.mask.apply(s, start)
        running = work.softmax.settle(state.running, s)
        p = work.softmax.exponentials(s, running.shift)
        total = work.softmax.sums(p, running.total)
        out = self.accumulate(running.out, p, state.slot)
        return State(Running(out, running.shift, total), self.advance(state.slot, 1), located)

    def advance(self, slot: Int32, steps: int) -> Int32:
        moved = slot + Int32(steps * self.memory.slot_bytes)
        return ptx.select(moved >= self.ring() + self.memory.ring_bytes, moved - self.memory.ring_bytes, moved)

    @cute.jit
    def publish(self, merge: Merge, mine: Part, running: Running) -> None:
        """Every warp has left its ring's last slots, which `fill` leaves free: outputs meet there."""
        if mine.active:
            ptx.sync_warp()
            merge.publish(running, self.warp())

    @cute.jit
    def conclude(self, merge: Merge, rows: PackedRows, segment: Segment, share: Share, mine: Part) -> None:
        if mine.active:
            ptx.sync_threads()
            merge.write(rows, segment, share, mine)
            ptx.sync_threads()  # the slots are free again

    # --- matrix products --------------------------------------------------------------------------------------------

    def scores(self, queries: Queries, slot: Int32, copies: Any, count: int) -> list[Float32]:
        memory, blocks = self.memory, self.spec.row_blocks
        lane = cute.arch.thread_idx()[0] & 31
        at = slot + place(lane & 15, lane >> 4, memory.row_bytes)
        acc = [Float32(0.0) for _ in range(4 * blocks * (memory.cols // 16))]
        pairs, done = memory.row_bytes // (2 * CHUNK), 0
        scales = [self.format.k_scales(slot, m) for m in range(memory.cols // 16)]
        for pair in range(pairs):
            k_at, offset = swizzled_offset(at, 2 * pair)
            for m in range(memory.cols // 16):
                loaded = ptx.ldmatrix_x4(k_at, offset + m * 16 * memory.row_bytes)
                for u, a in enumerate(self.format.k_operands(loaded, pair, scales[m])):
                    step = pair * self.format.operands_per_load + u
                    for block in range(blocks):
                        self._mma(acc, m * blocks + block, a, queries.fragments[block][step])
            while done < count * (pair + 1) // pairs:
                next(copies)
                done += 1
        return acc

    def accumulate(self, out: list[Float32], p: list[Float32], slot: Int32) -> list[Float32]:
        memory, blocks = self.memory, self.spec.row_blocks
        v_tile = slot + Int32(memory.v)
        lane = cute.arch.thread_idx()[0] & 31
        if self.format.transposed_pairs:
            at = v_tile + place((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1, memory.row_bytes)
        else:
            at = v_tile + place(lane & 15, lane >> 4, memory.row_bytes)
        acc = list(out)
        for m in range(memory.cols // 16):
            b = [self._probabilities(p, m * blocks + block) for block in range(blocks)]
            scales = self.format.v_scales(slot, m)
            for pair in range(memory.row_bytes // (2 * CHUNK)):
                v_at, offset = swizzled_offset(at, 2 * pair)
                loaded = ptx.ldmatrix_x4(v_at, offset + m * 16 * memory.row_bytes, transpose=True)
                for u, a in enumerate(self.format.v_operands(loaded, pair, scales)):
                    tile = pair * self.format.operands_per_load + u
                    weights = self.format.weights(b, tile, scales)
                    for block in range(blocks):
                        self._mma(acc, tile * blocks + block, a, weights[block])
        return acc

    def _probabilities(self, p: list[Float32], index: int) -> list[Int32]:
        """P^T as a B operand: a transposed 8x8 matrix for either half of the tokens."""
        four = p[4 * index : 4 * index + 4]
        return [isa.movmatrix(ptx.pack_16(self.spec.mma_dtype, four[j], four[j + 1])) for j in (0, 2)]

    def _mma(self, acc: list[Float32], index: int, a: list[Int32], b: list[Int32]) -> None:
        i = 4 * index
        acc[i : i + 4] = ptx.mma_m16n8k16(self.spec.mma_dtype, a, b, acc[i : i + 4])
