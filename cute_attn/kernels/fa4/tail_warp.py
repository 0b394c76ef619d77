"""Warp that clears rows of V past the keys of a request."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.masks import TileOrder
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings, WarpRole, start
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.smem import BlackwellMemory
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.formats import LINE


class TailWarp:
    """Role of the warp that zeroes rows of the last V tile that belong to another request or to none: 0 * NaN is not 0.
    That tile comes first. Of a pair only the leader sees that V has arrived, and its warp clears both halves.

    Tensor maps of a single request end with its keys, so that TMA fills in zeros; gathered rows are zeros too.
    """

    def __init__(self, program: PersistentProgram, spec: Fa4Spec, memory: BlackwellMemory) -> None:
        self.program, self.spec, self.memory = program, spec, memory
        self.role = WarpRole("tail", 1, fills={"tail": 1}, reads_records=True)

    @cute.jit
    def run(self, p: PersistentParams, rings: SmemRings) -> None:
        """Clears the tails of all work items of the CTA."""
        lane, cols = cute.arch.thread_idx()[0] & 31, self.spec.tile.cols
        q, v, tail = start(), start(), start()
        ring = rings.by_name["tail"]
        head_block = rings.next_head_block(q)
        while head_block >= 0:
            work = QueryTile.load(rings.record(q))
            order = self.program.order(p, work)
            rings.q.release(q, lane)
            if cutlass.and_(ends_inside(order, work, cols), self.program.cta.leads()):
                ring.wait_empty(tail)
                # With one stage, the V tile before may be in flight still, which has the parity of this one's wait.
                rings.v.wait_empty(v)
                rings.v.wait_full(v)
                self.clear(rings.v.address(v), work.kv_end - (order.end - 1) * cols, lane)
                ptx.sync_warp()
                ring.fill(tail, lane)
                tail = ring.next(tail)
            v = self.after(rings, v, order.total)
            q = rings.q.next(q)
            head_block = rings.next_head_block(q)

    @cute.jit
    def clear(self, slot: Int32, valid: Int32, lane: Int32) -> None:
        """Zeroes the rows of a V tile from `valid`."""
        cols = self.spec.tile.cols
        for chunk in cutlass.range(lane, (cols - valid) * (LINE // 16), 32, unroll=1):
            for column in cutlass.range_constexpr(self.memory.loaded("v").columns):
                self.program.cta.clear(slot + valid * LINE + chunk * 16, column * cols * LINE)
        self.program.cta.fence_async()

    def after(self, rings: SmemRings, v: PipelineState, tiles: Int32) -> PipelineState:
        """Returns the pipeline state `tiles` later."""
        period = 2 * rings.v.stages
        return PipelineState((v.index_phase + tiles) % period)


def ends_inside(order: TileOrder, work: QueryTile, cols: int) -> Boolean:
    """Whether the first kv tile contains rows past the keys of the request."""
    return cutlass.and_(order.total > 0, order.end * cols > work.kv_end)
