"""Epilogue warpgroup: normalises and stores the outputs of a work item while the next one is computed."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings, start
from cute_attn.kernels.blocks.register_layout import RowLayout
from cute_attn.kernels.blocks.roles import WarpRole
from cute_attn.kernels.blocks.row_store import RowStore
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.parts.lanes import RowLanes
from cute_attn.kernels.fa4.parts.umma import TmemMap, UmmaTile
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.work import KvSteps

WARPS = 4
COLUMNS = 16  # of O that are loaded at a time


class EpilogueWarps:
    """Role of the epilogue warps."""

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, tile: UmmaTile) -> None:
        self.program, self.spec, self.tile = program, spec, tile
        self.query_tiles = range(spec.tile.query_tiles)
        reads = tuple(f"{ring}{i}" for i in self.query_tiles for ring in ("stats", "o"))
        self.role = WarpRole("epilogue", WARPS, fills={}, reads=reads, reads_records=True)

    @cute.jit
    def run(self, p: PersistentParams, rings: SmemRings, tmem: TmemMap) -> None:
        """Stores the outputs of all work items of the CTA."""
        q, stats = start(), start()
        outputs = [start() for _ in self.query_tiles]
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work = QueryTile.load(rings.record(q))
            lanes = RowLanes.of(0, self.spec.tile.ctas)
            order = self.program.order(p, work)
            steps = KvSteps.of(p, work, order, self.spec.tile)
            rings.q.release(q, lanes.lane)
            for i in cutlass.range_constexpr(len(self.query_tiles)):
                active = steps.first[i] < order.total
                outputs[i] = self.query_tile(p, rings, work, tmem.output(i) + lanes.tmem, i, stats, outputs[i], active)
            q, stats = rings.q.next(q), rings.by_name["stats0"].next(stats)
            head_block = rings.next_head_block(q)

    @cute.jit
    def query_tile(
        self,
        p: PersistentParams,
        rings: cutlass.Constexpr,
        work: cutlass.Constexpr,
        o: Int32,
        i: cutlass.Constexpr,
        stats: PipelineState,
        output: PipelineState,
        active: cutlass.Boolean,
    ) -> Any:
        """Stores a query tile; where it has no visible key, O is not written, and zeros are stored."""
        lanes = RowLanes.of(i, self.spec.tile.ctas)
        shift, total = self.read_stats(rings.by_name[f"stats{i}"], stats, lanes)
        ring = rings.by_name[f"o{i}"]
        if active:
            ring.wait_full(output)
            sm100.fence_after_sync()

        def write(target: Target | Partials, epilogue: FinalEpilogue | PartialEpilogue) -> None:
            store = RowStore(RowLayout(COLUMNS), lanes, work.rows(p), target, epilogue)
            self.write(store, o, shift, total, active)

        self.program.store(p, work, write)
        if active:
            sm100.fence_before_sync()
            ptx.sync_warp()
            ring.release(output, lanes.lane)
            output = ring.next(output)
        return output

    def read_stats(self, ring: Ring, stats: PipelineState, lanes: RowLanes) -> tuple[list[Float32], list[Float32]]:
        ring.wait_full(stats)
        shift, total = ptx.ld_shared_v2_f32(ring.address(stats) + lanes.lane_row * 8)
        ptx.sync_warp()
        ring.release(stats, lanes.lane)
        return [shift], [total]

    @cute.jit
    def write(
        self, store: cutlass.Constexpr, o: Int32, shift: list[Float32], total: list[Float32], active: cutlass.Boolean
    ) -> None:
        factor = store.write_lse(shift, total)
        for first in cutlass.range_constexpr(0, self.spec.head_dim_vo, COLUMNS):
            values = [Float32(0.0) for _ in range(COLUMNS)]
            if active:
                values = sm100.wait_loads(sm100.load_columns(o, first, COLUMNS))
            count = min(COLUMNS, self.spec.head_dim_vo - first)
            store.write_columns(first, values[:count], factor)
