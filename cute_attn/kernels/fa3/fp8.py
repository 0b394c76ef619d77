"""The Hopper kernel for q, k and v in fp8: twice the products a clock, for operands contiguous along the sum.

V is not, so three warps beside the producer's transpose its tiles in shared memory:

    producer     K0 Q V0 K1 V1 K2 V2 ...
    transposers       V0'   V1'   V2' ...
    math group   S0 | S1 , O += P0 V0' , softmax 1 | S2 , O += P1 V1' , softmax 2 | ...

An fp8 product adds in 14 bits and drops the others: a sum of many keys comes out too small. So after every few tiles,
O goes into a sum in shared memory and starts anew.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.epilogue import Finish
from cute_attn.kernels.blocks.masks import BandMask
from cute_attn.kernels.blocks.pipeline import Place, Ring
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.scalars import device_scale, head_scale
from cute_attn.kernels.blocks.scores import RowScales, Scores
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.kernel import Fa3Params, MathWork, State
from cute_attn.kernels.fa3.parts.fp8 import Fp8Softmax, Fp8Store, Fp8Tile, ScaledUnfinished, ThreadSums, Transposition
from cute_attn.kernels.fa3.parts.rings import Shared
from cute_attn.kernels.fa3.parts.wgmma import ROWS, AnyLanes, FreshLanes, GroupLanes
from cute_attn.kernels.fa3.smem import Fp8Memory
from cute_attn.kernels.fa3.transform_warps import HelpedProgram
from cute_attn.kernels.formats import LINE

# Keys that the tensor cores sum up by themselves. Values of mean 2 and deviation 1 come out too small by 1.0 % with
# 768, by 0.4 % with 384, 2.4 % with 1536, 5 % with 3072; of mean 0.5 by 0.3, 0.1, 0.8 and 1.9 %.
SECTION = 768
TRANSPOSER_BARRIER = 9
LEAST_SCALE = 1e-30  # of scores: 0 would turn hidden ones into NaN
SIGNS = 0x80808080 - (1 << 32)


@dataclass(frozen=True)
class Fp8Shared(Shared):
    arriving: Ring
    sums: Int32

    @property
    def arriving_v(self) -> Ring:
        return self.arriving

    def record(self, q: Place) -> Int32:
        """Computed anew each time: there is no register for it meanwhile."""
        return super().record(Place(ptx.opaque(q.turn)))


class Fp8Program(HelpedProgram):
    memory: Fp8Memory
    tile: Fp8Tile
    storer = Fp8Store

    def group_tile(self) -> Fp8Tile:
        return Fp8Tile(self.spec.dtype, self.memory)

    def shared(self, base: Int32) -> Fp8Shared:
        memory, stages = self.memory, self.spec.tile.stages
        common = super().shared(base)
        barriers = base + Int32(memory.barriers + 8 * (memory.num_barriers - 2 * stages))
        arriving = Ring(stages, memory.arriving_v_bytes, base + Int32(memory.arriving_v_ring), barriers)
        transposed = dataclasses.replace(common.v, writers=self.helpers)
        return Fp8Shared(common.q, common.k, transposed, common.records, arriving, base + Int32(memory.sums))

    def softmax(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, scale: Any) -> Fp8Softmax:
        scales = [Float32(ptx.LOG2E)] * 2 if self.spec.scores else self.row_scales(p, work, lanes)
        return Fp8Softmax(self.tile, scales[0], scales)

    def scale_step(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> RowScales:
        if isinstance(lanes, FreshLanes):
            return RowScales(lambda: self.row_scales(p, work, lanes))
        scales = self.row_scales(p, work, lanes)
        return RowScales(lambda: scales)

    def scores(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes, scale: Any) -> Scores:
        return super().scores(p, work, FreshLanes() if self.spec.mask == "packed" else lanes, scale)

    def mask(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes) -> BandMask:
        return super().mask(p, work, FreshLanes() if self.spec.mask == "packed" else lanes)

    def row_scales(self, p: Fa3Params, work: QueryTile, lanes: AnyLanes) -> list[Float32]:
        """Of scores as `ready_q` leaves them."""
        rows, scales = work.rows(p), []
        for slot in range(2):
            row_scale = self.row_scale(p, work, rows.head(lanes.row(self.memory, slot)))
            scales.append(ptx.fmax(ptx.magnitude(row_scale), Float32(LEAST_SCALE)))
        return scales

    def row_scale(self, p: Fa3Params, work: QueryTile, head: Int32) -> Float32:
        """Put together for every query tile: between them there is no register for it."""
        scale = p.scale * device_scale(p.scale0) * device_scale(p.scale1)
        return scale * head_scale(p.scale_k, self.kv_head(p, work)) * head_scale(p.scale_q, head)

    @cute.jit
    def ready_q(
        self, p: Fa3Params, work: cutlass.Constexpr, lanes: GroupLanes, q_rows: Int32, scale: Float32
    ) -> Float32:
        """Softmax wants scales above 0: rows with one below get the other sign. A product reads a warp's 16 rows for
        that warp alone.
        """
        row = lanes.warp * 16 + lanes.lane // 2
        turned = self.row_scale(p, work, work.rows(p).head(lanes.group * ROWS + row)) < Float32(0.0)
        if cute.arch.vote_any_sync(turned):
            if turned:
                half = q_rows + row * LINE + lanes.lane % 2 * (LINE // 2)
                for column in cutlass.range_constexpr(self.memory.qk_columns):
                    for i in cutlass.range_constexpr(4):
                        offset = column * self.spec.tile.rows * LINE + 16 * i
                        words = ptx.ld_shared_v4(half, offset)
                        ptx.st_shared_v4(half, offset, [word ^ Int32(SIGNS) for word in words])
            sm90.fence_async()
            ptx.sync_warp()
        return scale

    def kv_head(self, p: Fa3Params, work: QueryTile) -> Int32:
        return Divisor(p.kv_group, p.kv_group_multiplier, p.kv_group_shift).quotient(work.head_block)

    def finishes(self, p: Fa3Params, work: QueryTile) -> tuple[Finish, ScaledUnfinished]:
        head = head_scale(p.scale_v, self.kv_head(p, work))
        whole = Finish(p.sinks, p.v_scale * device_scale(p.v_scale_ptr) * head, p.lse_scale)
        return whole, ScaledUnfinished(head)

    # --- transposers ------------------------------------------------------------------------------------------------

    def work(self, warp: Int32, lane: Int32) -> Transposition:
        return Transposition(self.memory, warp, lane, self.helpers, TRANSPOSER_BARRIER)

    @cute.jit
    def help(self, shared: Shared, work: cutlass.Constexpr, at: Place, total: Int32, valid: Int32) -> Any:
        for step in cutlass.range(0, total, unroll=1):
            shared.arriving_v.wait_full(at)
            if cutlass.const_expr(self.spec.schedule == "items"):  # noqa: SIM102
                if cutlass.and_(step == 0, valid < self.spec.tile.cols):
                    work.clear(shared.arriving_v.address(at), valid)
            shared.v.wait_empty(at)
            work.run(shared.arriving_v.address(at), shared.v.address(at))
            self.made([shared.arriving_v.empty(at), shared.v.full(at)], work.lane)
            at = shared.v.next(at)
        return at

    # --- math groups ------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(self, shared: Shared, math: cutlass.Constexpr, k: Place) -> Any:
        self.sums(shared).clear()
        step0 = math.skipped + 1
        masked, total = ptx.maximum(math.order.masked, step0), math.order.total
        state = self.first(shared, math, k)
        state = self.sections(shared, math, state, step0, masked, True)
        if cutlass.const_expr(self.spec.mask != "packed"):  # whose tiles are all masked
            state = self.sections(shared, math, state, masked, total, False)
        return state

    @cute.jit
    def sections(
        self,
        shared: Shared,
        math: cutlass.Constexpr,
        state: cutlass.Constexpr,
        begin: Int32,
        end: Int32,
        masked: cutlass.Constexpr,
    ) -> Any:
        """The kv tiles of steps [begin, end)."""
        order, rest = math.order, begin
        if cutlass.const_expr(not masked or self.spec.mask == "packed"):  # of other masks, few tiles are masked
            tiles = SECTION // self.spec.tile.cols
            rest = begin + (end - begin) // tiles * tiles
            for first in cutlass.range(begin, rest, tiles, unroll=1):
                for step in cutlass.range(first, first + tiles, unroll=1):
                    state = self.step(shared, math, state, order.at(step) if masked else order.full_at(step), masked)
                state = self.promoted(shared, math, state)
        for step in cutlass.range(rest, end, unroll=1):
            state = self.step(shared, math, state, order.at(step) if masked else order.full_at(step), masked)
        return state

    @cute.jit
    def promoted(self, shared: Shared, math: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """The tensor cores' sum goes into the one in shared memory. Rows that have summed little, which is next to
        nothing but their peak, get more of e4m3's range: what lies far below the peak is not lost any more.
        """
        out = self.sums(shared).add(state.out)
        rises = math.softmax.room(state.total)
        p, shift, total = state.p, state.shift, state.total
        if cute.arch.vote_any_sync(cutlass.or_(*(rise > Float32(0.0) for rise in rises))):
            factors = [ptx.exp2(rise) for rise in rises]
            out = self.rescaled(shared, out, factors)
            p = self.tile.scaled(p, factors)
            shift = [x + rise for x, rise in zip(shift, rises, strict=True)]
            total = [x * factor for x, factor in zip(total, factors, strict=True)]
        return State(out, p, shift, total, state.k)

    def rescaled(self, shared: Any, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        return self.sums(shared).scale(out, factors)

    def last_output(self, shared: Any, math: MathWork, state: State) -> list[Float32]:
        return self.sums(shared).plus(super().last_output(shared, math, state))

    def sums(self, shared: Any) -> ThreadSums:
        return ThreadSums.of(self.memory, shared.sums)
