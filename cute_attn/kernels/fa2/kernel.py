"""FlashAttention-2 on mma.sync, one source for sm_80 to sm_12x (Dao 2023; packed GQA rows as in FlashInfer).

One CTA takes `tile.rows` packed query rows of one kv head and walks over kv tiles:

    cp.async ring   K,V[t+1] ------------> K,V[t+2] ----------->      `stages` slots, one barrier per tile
    warps           S = Q K[t]^T | softmax | O += P V[t] | S = ...

With `warps_cols` 1 every warp owns rows and the CTA shares each tile. With more (decode: few rows), every warp owns
columns: it loads, waits for and consumes its own part of the ring without any CTA barrier, and the warps merge once at
the end. Two CTAs share an SM, so that the softmax of one overlaps the matrix products of the other. Where an output
exceeds the registers of a warp (`tile.exchange`), warps exchange P and divide the output's columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import e2m1_converter, fp8_converter
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, RowStats, Target
from cute_attn.kernels.blocks.masks import BandMask, TileOrder
from cute_attn.kernels.blocks.program import AttentionProgram, Epilogues
from cute_attn.kernels.blocks.rope import RowRotation
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.blocks.scores import Scores, score_scale
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax
from cute_attn.kernels.fa2.parts.epilogue import MergedWarps, WarpRows
from cute_attn.kernels.fa2.parts.exchange import Exchange, SharedRows, SlicedRows, SlicedTile
from cute_attn.kernels.fa2.parts.kv import (
    Converted,
    DenseKV,
    Nvfp4,
    PagedKV,
    ScaleRows,
    Scales,
    Stored,
    Team,
    TokenRows,
)
from cute_attn.kernels.fa2.parts.mma import Lanes, OwnRows, WarpTile
from cute_attn.kernels.fa2.parts.tile_scheduler import WorkTile, of_grid, of_items
from cute_attn.kernels.fa2.smem import SharedMemory
from cute_attn.kernels.fa2.spec import Fa2Spec
from cute_attn.kernels.formats import LINE
from cute_attn.runtime.arch import named


class Fa2Params(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64, 0 where absent; strides are bytes."""

    q: Int64
    k: Int64
    v: Int64
    o: Int64
    lse: Int64
    mask: Int64
    mask_bytes: Int64
    scale0: Int64
    scale1: Int64
    v_scale_ptr: Int64
    sinks: Int64
    q_stride_n: Int64
    q_stride_h: Int64
    k_stride_n: Int64
    k_stride_h: Int64
    v_stride_n: Int64
    v_stride_h: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    qo_len: Int32
    kv_len: Int32
    group: Divisor
    num_qo_heads: Int32
    num_kv_heads: Divisor
    right: Int32
    left: Int32
    full_tiles: Int32  # -1; 0: all kv tiles count as masked
    range_left: Int32  # mask "ranges": see `RangeMask`
    tiles_per_split: Int32
    scale: Float32
    soft_cap: Float32
    v_scale: Float32
    rope_base: Float64
    rope_ratio: Float64
    lse_scale: Float32
    # schedule "items"
    items: Int64
    o_partial: Int64
    lse_partial: Int64
    # kv "paged"
    kv_indices: Int64
    k_stride_page: Int64
    v_stride_page: Int64
    page_size: Divisor
    # kv_dtype "nvfp4"
    k_scales: Int64
    v_scales: Int64
    k_scales_stride_page: Int64
    k_scales_stride_n: Int64
    k_scales_stride_h: Int64
    v_scales_stride_page: Int64
    v_scales_stride_n: Int64
    v_scales_stride_h: Int64
    # dtype fp8: scales per head
    scale_q: Int64
    scale_k: Int64
    scale_v: Int64


class State(NamedTuple):
    """Loop state over kv tiles: accumulators, ring slot of the next tile, page ids of the tile to be copied next."""

    running: Running
    slot: Int32
    page_ids: list[Int32]


@dataclass(frozen=True)
class Work:
    """Building blocks of one CTA, composed for its spec."""

    lanes: Lanes
    team: Team
    rows: PackedRows
    kv: DenseKV | PagedKV
    source: Stored | Converted
    mask: BandMask
    scores: Scores
    products: OwnRows | SharedRows
    rotation: RowRotation | None
    order: TileOrder
    ring: Int32


class Fa2Program(AttentionProgram):
    """Kernel for 16-bit q; `fp8.Fp8Program` replaces what operands of 8 bits change."""

    params = Fa2Params
    tile_type = WarpTile
    softmax_type = RunningSoftmax
    min_ctas = 0

    def __init__(self, spec: Fa2Spec, arch: str) -> None:
        self.spec = spec
        self.memory = SharedMemory.of(spec)
        self.tile = (SlicedTile if spec.tile.exchange else self.tile_type)(spec.dtype, self.memory)
        self.work_tile = of_grid if spec.schedule == "grid" else of_items
        self.block = (spec.tile.threads, 1, 1)
        self.smem_bytes = self.memory.bytes
        self.arch = named(arch)
        self.pdl = self.arch.pdl

    @cute.kernel
    def kernel(self, params: Fa2Params) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
        work_tile = self.work_tile(params, self.spec.tile)
        if cutlass.const_expr(self.spec.schedule == "items"):
            if work_tile.qo_len != 0:
                self.attention(params, work_tile)
        else:
            self.attention(params, work_tile)

    @cute.jit
    def attention(self, params: Fa2Params, work_tile: cutlass.Constexpr) -> None:
        base = shared_memory()
        work = self.compose(params, work_tile, base)
        page_ids = self.prefetch_page_ids(work)
        self.load_q(params, work_tile, work, base)
        self.fill_ring(work, page_ids)
        state = State(work.products.softmax.start(), work.ring, page_ids[-1])
        masked, total = work.order.masked, work.order.total
        for step in cutlass.range(0, masked, unroll=1):
            state = self.step(work, base, state, step, True)
        for step in cutlass.range(masked, total, unroll=1):
            state = self.step(work, base, state, step, False)
        ptx.cp_async_wait(0)
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_launch()
        running = state.running
        stats = RowStats.of(self.tile.output_layout, running.shift, running.total)
        self.store_outputs(params, work_tile, work, base, running.out, stats)

    def order(self, p: Fa2Params, mask: Any, work_tile: WorkTile) -> TileOrder:
        tile = self.spec.tile
        order: TileOrder = mask.tiles(tile.rows, tile.cols, work_tile.first_tile, work_tile.last_tile)
        batch_band = self.spec.mask in ("band", "ranges") and self.spec.schedule == "items"
        return order.with_full(p.full_tiles) if batch_band else order

    # --- composition ------------------------------------------------------------------------------------------------

    def compose(self, p: Fa2Params, work_tile: WorkTile, base: Int32) -> Work:
        memory = self.memory
        rows = work_tile.rows(p)
        lanes, team = Lanes.of(memory, cute.arch.thread_idx()[0]), Team.of(memory)
        mask = self.mask(p, work_tile, lanes)
        scale = score_scale(p)
        return Work(
            lanes=lanes,
            team=team,
            rows=rows,
            kv=self.make_kv(p, work_tile, team),
            source=self.make_source(base),
            mask=mask,
            scores=self.scores(p, work_tile, lanes, [scale for _ in self.tile.scores_layout.slots]),
            products=self.make_products(Float32(ptx.LOG2E) if self.spec.scores else scale, lanes, base),
            rotation=self.make_rotation(p, base),
            order=self.order(p, mask, work_tile),
            ring=base + Int32(memory.ring),
        )

    def make_kv(self, p: Fa2Params, work_tile: WorkTile, team: Team) -> DenseKV | PagedKV:
        spec, memory, head = self.spec, self.memory, Int64(work_tile.kv_head)
        k_bytes, v_bytes = (memory.k_bytes, memory.k_pitch), (memory.v_bytes, memory.v_pitch)
        k = TokenRows(p.k + head * p.k_stride_h, p.k_stride_n, p.k_stride_page, *k_bytes, spec.kv_copy_bytes)
        v = TokenRows(p.v + head * p.v_stride_h, p.v_stride_n, p.v_stride_page, *v_bytes, spec.kv_copy_bytes)
        scales = self.make_scales(p, work_tile)
        if spec.kv == "paged":
            kv_end, first_page = work_tile.kv_end, work_tile.kv_start
            return PagedKV(memory, team, k, v, scales, kv_end, p.kv_indices, first_page, p.page_size)
        return DenseKV(memory, team, k.moved(work_tile.kv_start), v.moved(work_tile.kv_start), scales, work_tile.kv_end)

    def make_scales(self, p: Fa2Params, work_tile: WorkTile) -> ScaleRows | None:
        spec, head = self.spec, Int64(work_tile.kv_head)
        if spec.kv_dtype != "nvfp4":
            return None
        first = Int64(work_tile.kv_start if spec.kv == "dense" else 0)
        k = p.k_scales + head * p.k_scales_stride_h + first * p.k_scales_stride_n
        v = p.v_scales + head * p.v_scales_stride_h + first * p.v_scales_stride_n
        return ScaleRows(
            Scales(k, p.k_scales_stride_n, p.k_scales_stride_page, Int32(spec.head_dim_qk // 64)),
            Scales(v, p.v_scales_stride_n, p.v_scales_stride_page, Int32(spec.head_dim_vo // 64)),
        )

    def make_source(self, base: Int32) -> Stored | Converted:
        spec, target = self.spec, base + Int32(self.memory.converted)
        if not spec.kv_dtype:
            return Stored()
        if spec.kv_dtype == "nvfp4":
            scales = fp8_converter(spec.dtype, "float8_e4m3fn", self.arch)
            return Converted(self.memory, Nvfp4(spec.dtype, e2m1_converter(spec.dtype, self.arch), scales), target)
        return Converted(self.memory, fp8_converter(spec.dtype, spec.kv_dtype, self.arch), target)

    def make_products(self, log2_scale: Float32, lanes: Lanes, base: Int32) -> OwnRows | SharedRows:
        tile, layout = self.tile, self.tile.scores_layout
        softmax = self.softmax_type(layout, [log2_scale for _ in layout.slots], output=tile.output_layout)
        if isinstance(tile, SlicedTile):
            return SharedRows(tile, softmax, Exchange(self.memory, base, lanes, layout))
        return OwnRows(tile, softmax, lanes)

    def make_rotation(self, p: Fa2Params, base: Int32) -> RowRotation | None:
        if self.spec.pos_encoding == "none":
            return None
        table = base + Int32(self.memory.rope_table)
        pitch = self.memory.qk_pitch
        return RowRotation(
            self.spec.dtype, self.spec.head_dim_qk, table, p.rope_base, p.rope_ratio, self.block[0], pitch
        )

    # --- output -----------------------------------------------------------------------------------------------------

    def store_outputs(
        self, p: Fa2Params, work_tile: WorkTile, work: Work, base: Int32, out: list[Float32], stats: RowStats
    ) -> None:
        if self.spec.schedule == "items":
            work_tile = self.work_tile(p, self.spec.tile)
        rows = work_tile.rows(p)

        def write(target: Target | Partials, epilogue: FinalEpilogue | PartialEpilogue) -> None:
            lanes = work.lanes
            if target.dtype == "float32":
                # Not the lanes of the mask: the tokens of its rows would stay in registers through the loop for the
                # epilogue.
                lanes = Lanes.of(self.memory, ptx.opaque(cute.arch.thread_idx()[0]))
            store = self.store_type(self.tile.output_layout, lanes, rows, target, epilogue, self.memory, base)
            store.write(out, stats)

        self.store(p, work_tile, write)

    def epilogues(self, p: Fa2Params, work: WorkTile) -> Epilogues:
        return lambda: FinalEpilogue.of(p), PartialEpilogue

    def partial_row(self, p: Fa2Params, work: WorkTile) -> Int64:
        slot = Int64(work.partial) * Int64(p.num_kv_heads.value) + Int64(work.kv_head)
        return slot * Int64(self.spec.tile.rows)

    @property
    def store_type(self) -> type[WarpRows | MergedWarps | SlicedRows]:
        tile = self.spec.tile
        return SlicedRows if tile.exchange else WarpRows if tile.warps_cols == 1 else MergedWarps

    # --- phases -----------------------------------------------------------------------------------------------------

    @cute.jit
    def load_q(self, p: Fa2Params, work_tile: cutlass.Constexpr, work: cutlass.Constexpr, base: Int32) -> None:
        """Copies Q rows into shared memory, by all threads in one cp.async group; nonexistent rows become zeros."""
        thread, pitch, chunks = cute.arch.thread_idx()[0], self.memory.qk_pitch, self.memory.q_bytes // CHUNK
        chunk = thread % 8
        if cutlass.const_expr(work.rotation is not None):
            work.rotation.prepare()
        for row in cutlass.range(thread // 8, self.spec.tile.rows, self.block[0] // 8, unroll=1):
            source = work.rows.address(p.q, row, p.q_stride_n, p.q_stride_h) + Int64(chunk * CHUNK)
            size = ptx.select(work.rows.exists(row), Int32(CHUNK), Int32(0))
            for line in cutlass.range_constexpr(pitch // LINE):
                part = ptx.select(chunk < chunks - line * 8, size, Int32(0))
                ptx.cp_async(base + swizzled(row, chunk, pitch), line * LINE, source, line * LINE, part)
        ptx.cp_async_commit()
        if cutlass.const_expr(work.rotation is not None):
            ptx.cp_async_wait(0)
            ptx.sync_threads()
            shift = work_tile.kv_len - work_tile.qo_len
            all_threads = Team(self.block[0], thread, Int32(0))
            work.rotation.rotate_rows(all_threads, base, self.spec.tile.rows, lambda row: work.rows.token(row) + shift)
            ptx.sync_threads()

    def prefetch_page_ids(self, work: Work) -> list[list[Int32]]:
        """Loads the page ids of the first `stages` tiles."""
        order = work.order
        return [
            work.kv.prefetch_page_ids(order.at(Int32(step)), Int32(step) < order.total)
            for step in range(self.spec.tile.stages)
        ]

    def fill_ring(self, work: Work, page_ids: list[list[Int32]]) -> None:
        """Copies the first `stages - 1` tiles, one cp.async group each; groups are committed even if empty."""
        for step in range(self.spec.tile.stages - 1):
            slot = work.ring + Int32(step * self.memory.slot_bytes)
            for _ in work.kv.copies(work.order.at(Int32(step)), slot, Int32(step) < work.order.total, page_ids[step]):
                pass
            ptx.cp_async_commit()
        if not self.spec.tile.one_team:
            # Teams are single warps here, but all of them loaded Q: the only CTA barrier before the loop.
            ptx.cp_async_wait(self.spec.tile.stages - 1)
            ptx.sync_threads()

    def step(self, work: Work, base: Int32, state: State, step: Int32, masked: bool) -> State:
        """Processes one kv tile: waits for it, computes S while copying the tile `stages - 1` later, then softmax and
        O.
        """
        ahead, slot = self.spec.tile.stages - 1, state.slot
        ptx.cp_async_wait(ahead - 1)
        work.team.sync()  # the tile is visible, and the slot filled next is no longer read
        tile_at = work.order.at if masked else work.order.full_at
        kv_tile = tile_at(step)
        wanted = step + ahead < work.order.total
        copies = work.kv.copies(tile_at(step + ahead), self.advance(slot, ahead), wanted, state.page_ids)
        operand = work.source.operand(work.team, slot, copies, work.kv.count)
        self.rotate_k(work, operand.address, kv_tile)
        s = self.tile.scores(base + work.lanes.q, operand.address + work.lanes.k, operand.copies, operand.count)
        ptx.cp_async_commit()
        page_ids = work.kv.prefetch_page_ids(tile_at(step + ahead + 1), step + ahead + 1 < work.order.total)
        s = work.scores.apply(s, kv_tile * self.spec.tile.cols)
        if masked:
            s = work.mask.apply(s, kv_tile * self.spec.tile.cols)
        running = work.products.add(state.running, s, operand.address, masked)
        return State(running, self.advance(slot, 1), page_ids)

    def rotate_k(self, work: Work, k: Int32, kv_tile: Int32) -> None:
        if work.rotation is not None:
            rows = self.spec.tile.team_cols
            row0 = work.team.index * rows
            start = kv_tile * self.spec.tile.cols + row0
            work.rotation.rotate_rows(work.team, k + row0 * self.memory.qk_pitch, rows, lambda row: start + row)
            work.team.sync()

    def advance(self, slot: Int32, steps: int) -> Int32:
        """Returns the shared address `steps` slots later in the ring."""
        size = self.memory.slot_bytes
        end = shared_memory() + Int32(self.memory.converted)
        moved = slot + Int32(steps * size)
        return ptx.select(moved >= end, moved - Int32(self.spec.tile.stages * size), moved)
