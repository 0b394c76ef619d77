"""Epilogue warpgroup: normalises and stores the outputs of a work item while the next one is computed.

16-bit rows of a query tile that all exist go through a staging buffer and TMA. Other query tiles, fp32 outputs and
partials are stored by the threads that own the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, sm100, tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.parts.umma import RowLanes, TmemMap, UmmaTile
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS, Fa4Spec
from cute_attn.kernels.fa4.work import KvSteps
from cute_attn.kernels.formats import LINE

BARRIER = 1  # named, of the epilogue warpgroup
COLUMN_BYTES = QUERY_TILE_ROWS * LINE
WARPS = 4
COLUMNS = 32  # of O that are loaded at a time, or the half where O ends


@dataclass(frozen=True)
class OutputStaging:
    """Staging buffer of one query tile of 16-bit outputs, in shared memory, in columns of 128-byte lines as TMA reads
    them. One thread of the warpgroup, always the same, starts the stores and waits for them.
    """

    dtype: str
    columns: int  # of lines
    buffer: Int32
    lanes: RowLanes

    @property
    def storing(self) -> Boolean:
        """Whether this thread is the one that stores."""
        return self.lanes.lane_row == 0

    def acquire(self) -> None:
        """Waits until the tile before has been read from the buffer."""
        self.drain()
        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)

    def write_columns(self, first: int, values: Sequence[Float32]) -> None:
        """Writes columns from `first`, multiples of eight, of the thread's row."""
        row = self.buffer + swizzled(self.lanes.lane_row, Int32(0), LINE)
        for i in range(0, len(values), 8):
            chunk, words = (first + i) // 8, ptx.pack_pairs(self.dtype, values[i : i + 8])
            ptx.st_shared_v4(row ^ Int32(chunk % 8 * CHUNK), chunk // 8 * COLUMN_BYTES, words)

    @cute.jit
    def store(self, tensor_map: Int64, place: list[Int32]) -> None:
        """Starts storing the buffer to the rows from `place` (head, token, block of heads), after all writes."""
        tma.fence_async()
        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)
        if self.storing:
            for column in cutlass.range_constexpr(self.columns):
                tma.store_4d(
                    tensor_map, [Int32(column * (LINE // 2)), *place], self.buffer + Int32(column * COLUMN_BYTES)
                )
            tma.store_commit()

    @cute.jit
    def drain(self) -> None:
        """Waits until all stores have read the buffer."""
        if self.storing:
            tma.store_wait_read()


@dataclass(frozen=True)
class OutputTile:
    """O of a query tile in tensor memory, and where its rows go."""

    p: PersistentParams
    work: QueryTile
    lanes: RowLanes
    ring: Ring
    state: PipelineState
    address: Int32  # of the warp's lanes
    active: Boolean  # whether O was written: the query tile has a visible key
    staging: OutputStaging | None
    tensor_map: Int64

    @property
    def first_row(self) -> Int32:
        return self.lanes.number * QUERY_TILE_ROWS

    @property
    def rows(self) -> PackedRows:
        return self.work.rows(self.p)

    @property
    def whole(self) -> Boolean:
        """Whether all rows exist: a box is clipped at the end of the tensor only."""
        return self.rows.exists(self.first_row + Int32(QUERY_TILE_ROWS - 1))


class EpilogueWarps:
    """Role of the epilogue warps."""

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile) -> None:
        self.program, self.spec, self.tile = program, spec, tile
        self.query_tiles = range(spec.tile.query_tiles)
        reads = tuple(f"{ring}{i}" for i in self.query_tiles for ring in ("stats", "o"))
        self.role = WarpRole("epilogue", WARPS, fills={}, reads=reads, reads_records=True)

    @cute.jit
    def run(self, p: PersistentParams, o_map: Int64, rings: SmemRings, tmem: TmemMap) -> None:
        """Stores the outputs of all work items of the CTA."""
        q, outputs, stats = start(), [start() for _ in self.query_tiles], [start() for _ in self.query_tiles]
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work = QueryTile.load(rings.record(q))
            lanes = RowLanes.of(Int32(0), self.spec.tile.ctas)
            order = self.program.order(p, work)
            steps = KvSteps.of(p, work, order, self.spec.tile)
            rings.q.release(q, lanes.lane)
            for i in cutlass.range_constexpr(len(self.query_tiles)):
                lanes, ring = RowLanes.of(Int32(i), self.spec.tile.ctas), rings.by_name[f"o{i}"]
                active, address = steps.first[i] < order.total, tmem.output(i) + lanes.tmem
                staging = self.staging(rings, lanes)
                tile = OutputTile(p, work, lanes, ring, outputs[i], address, active, staging, o_map)
                outputs[i] = self.query_tile(tile, rings.by_name[f"stats{i}"], stats[i])
            q = rings.q.next(q)
            stats = [rings.by_name[f"stats{i}"].next(state) for i, state in enumerate(stats)]
            head_block = rings.next_head_block(q)
        self.finish(rings)

    def staging(self, rings: SmemRings, lanes: RowLanes) -> OutputStaging | None:
        memory = self.tile.memory
        if not memory.staging_bytes:
            return None
        return OutputStaging(self.spec.out_dtype, memory.output_columns, rings.scratch["staging"], lanes)

    def finish(self, rings: SmemRings) -> None:
        """Keeps shared memory until it has been read."""
        staging = self.staging(rings, RowLanes.of(Int32(0), self.spec.tile.ctas))
        if staging:
            staging.drain()

    @cute.jit
    def query_tile(self, tile: cutlass.Constexpr, stats_ring: cutlass.Constexpr, stats: PipelineState) -> Any:
        """Stores a query tile; where it has no visible key, O is not written, and zeros are stored."""
        shift, total = self.read_stats(stats_ring, stats, tile.lanes)
        output = tile.state
        if tile.active:
            tile.ring.wait_full(output)
            sm100.fence_after_sync()

        def write(target: Target | Partials, epilogue: FinalEpilogue | PartialEpilogue) -> None:
            self.write(tile, target, epilogue, shift, total)

        self.program.store(tile.p, tile.work, write)
        if tile.active:
            output = tile.ring.next(output)
        return output

    def read_stats(self, ring: Ring, stats: PipelineState, lanes: RowLanes) -> tuple[Float32, Float32]:
        """Waits for what softmax leaves of the thread's row: negated maximum and sum."""
        ring.wait_full(stats)
        shift, total = ptx.ld_shared_v2_f32(ring.address(stats) + lanes.lane_row * 8)
        ptx.sync_warp()
        ring.release(stats, lanes.lane)
        return shift, total

    @cute.jit
    def write(
        self,
        tile: cutlass.Constexpr,
        target: cutlass.Constexpr,
        epilogue: cutlass.Constexpr,
        shift: Float32,
        total: Float32,
    ) -> None:
        """Writes lse and output."""
        rows, row = tile.rows, tile.lanes.row(0)
        factor, lse = epilogue.row(Float32(0.0) - shift, total, rows.head(row))
        if rows.exists(row):
            target.store_lse(rows, row, lse)
        if cutlass.const_expr(tile.staging is not None and isinstance(target, Target)):
            if tile.whole:
                self.write_staged(tile, factor)
            else:
                self.write_rows(tile, target, factor)
        else:
            self.write_rows(tile, target, factor)

    def write_staged(self, tile: Any, factor: Float32) -> None:
        staging = tile.staging
        staging.acquire()
        for first, count in self.pieces():
            staging.write_columns(first, [x * factor for x in self.load(tile, first, count)])
        self.release(tile)
        rows = tile.rows
        head = rows.head(tile.first_row) - rows.first_head  # not 0 where one token's heads fill more than a query tile
        staging.store(tile.tensor_map, [head, rows.start + rows.token(tile.first_row), tile.work.head_block])

    def write_rows(self, tile: OutputTile, target: Target | Partials, factor: Float32) -> None:
        for first, count in self.pieces():
            self.write_columns(tile, target, first, [x * factor for x in self.load(tile, first, count)])
        self.release(tile)

    @cute.jit
    def write_columns(
        self, tile: cutlass.Constexpr, target: cutlass.Constexpr, first: cutlass.Constexpr, values: list[Float32]
    ) -> None:
        """Stores columns from `first` of the thread's row; all are multiples of eight.

        Rows of `out` need not start at multiples of 32 bytes, where the hardware would take 32 bytes at a time.
        """
        rows, row = tile.rows, tile.lanes.row(0)
        if rows.exists(row):
            size, aligned = target.element_bytes, target.aligned_to_32
            address, at_once = target.row(rows, row) + Int64(first * size), 32 // size
            for i in cutlass.range_constexpr(0, len(values), at_once):
                part = values[i : i + at_once]
                if cutlass.const_expr(len(part) == at_once):
                    target.store_32_bytes(address, i * size, part, aligned)
                else:
                    target.store(address, i * size, part)

    def pieces(self) -> list[tuple[int, int]]:
        """Lists (first column, columns) of O to process at a time."""
        dims = self.spec.head_dim_vo
        return [(first, min(COLUMNS, dims - first)) for first in range(0, dims, COLUMNS)]

    @cute.jit
    def load(self, tile: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr) -> list[Float32]:
        """Loads `count` columns of O, a multiple of eight."""
        values = [Float32(0.0) for _ in range(count)]
        if tile.active:
            loaded = COLUMNS if count > COLUMNS // 2 else COLUMNS // 2
            values = sm100.wait_loads(sm100.load_columns(tile.address, first, loaded))[:count]
        return values

    @cute.jit
    def release(self, tile: cutlass.Constexpr) -> None:
        """Gives O back to the products, before its stores are complete."""
        if tile.active:
            sm100.fence_before_sync()
            ptx.sync_warp()
            tile.ring.release(tile.state, tile.lanes.lane)
