"""Hopper kernel for q, k and v in fp8: twice the products per clock, for operands contiguous along the sum (K-major).

V is not, so three transform warps in the producer's warpgroup transpose its tiles in shared memory:

    producer          K0 Q V0 K1 V1 K2 V2 ...
    transform warps        V0'   V1'   V2' ...
    MMA warpgroup     S0 | S1 , O += P0 V0' , softmax 1 | S2 , O += P1 V1' , softmax 2 | ...

An fp8 product accumulates in 14 bits and truncates: a sum over many keys comes out too small. So after every few tiles,
O is promoted: added to a sum in shared memory, and restarted.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.fp8_scales import MIN_SCALE, ScaledPartialEpilogue, row_scale, scaled_epilogues
from cute_attn.kernels.blocks.masks import BandMask
from cute_attn.kernels.blocks.persistent_params import AnyParams, PersistentParams
from cute_attn.kernels.blocks.pipeline import PipelineState, SmemRings
from cute_attn.kernels.blocks.scores import RowScales, Scores
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.blocks.transform_warps import TransformWarps
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.mainloop import MmaWarpgroups, MmaWork, State
from cute_attn.kernels.fa3.parts.fp8 import (
    Fp8Softmax,
    Fp8Store,
    Fp8Tile,
    NarrowFp8Store,
    ThreadSums,
    VTranspose,
)
from cute_attn.kernels.fa3.parts.wgmma import WARPGROUP_ROWS, AnyLanes, RematerializedLanes, WarpgroupLanes
from cute_attn.kernels.fa3.smem import Fp8Memory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.formats import LINE

# Keys that the tensor cores accumulate between promotions. Values of mean 2 and deviation 1 come out too small by 1.0 %
# with 768, by 0.4 % with 384, 2.4 % with 1536, 5 % with 3072; of mean 0.5 by 0.3, 0.1, 0.8 and 1.9 %.
PROMOTION_KEYS = 768
TRANSPOSE_BARRIER = 9
SIGNS = 0x80808080 - (1 << 32)


class Fp8Rings(SmemRings):
    """Rings that compute the address of a record at every use: no register is free to hold it in between."""

    def record(self, q: PipelineState) -> Int32:
        return super().record(PipelineState(ptx.opaque(q.index_phase)))


class VTransposeWarps(TransformWarps):
    """Transform warps that transpose V."""

    memory: Fp8Memory

    def transform(self, warp: Int32, lane: Int32) -> VTranspose:
        return VTranspose(self.memory, warp, lane, self.warps, TRANSPOSE_BARRIER)

    @cute.jit
    def transform_tiles(
        self, rings: SmemRings, transform: cutlass.Constexpr, at: PipelineState, total: Int32, valid: Int32
    ) -> Any:
        for step in cutlass.range(0, total, unroll=1):
            rings.staged_v.wait_full(at)
            if cutlass.const_expr(self.spec.schedule == "items"):  # noqa: SIM102
                if cutlass.and_(step == 0, valid < self.spec.tile.cols):
                    transform.clear(rings.staged_v.address(at), valid)
            rings.v.wait_empty(at)
            transform.run(rings.staged_v.address(at), rings.v.address(at))
            self.publish_operand([rings.staged_v.empty(at), rings.v.full(at)], transform.lane)
            at = rings.v.next(at)
        return at


class Fp8MmaWarpgroups(MmaWarpgroups):
    """MMA warpgroups that promote O."""

    memory: Fp8Memory
    tile: Fp8Tile
    store_type, narrow_store_type = Fp8Store, NarrowFp8Store

    @cute.jit
    def mainloop(self, rings: SmemRings, mma: cutlass.Constexpr, k: PipelineState) -> Any:
        self.sums(rings).clear()
        step0 = mma.skipped + 1
        masked, total = ptx.maximum(mma.order.masked, step0), mma.order.total
        state = self.first_kv_tile(rings, mma, k)
        state = self.promoted_steps(rings, mma, state, step0, masked, True)
        if cutlass.const_expr(self.spec.mask != "packed"):  # all tiles of a packed mask are masked
            state = self.promoted_steps(rings, mma, state, masked, total, False)
        return state

    @cute.jit
    def promoted_steps(
        self,
        rings: SmemRings,
        mma: cutlass.Constexpr,
        state: cutlass.Constexpr,
        begin: Int32,
        end: Int32,
        masked: cutlass.Constexpr,
    ) -> Any:
        """Processes the kv tiles of steps [begin, end), with a promotion after every `PROMOTION_KEYS` keys."""
        order, rest = mma.order, begin
        if cutlass.const_expr(not masked or self.spec.mask == "packed"):  # other masks have few masked tiles
            tiles = PROMOTION_KEYS // self.spec.tile.cols
            rest = begin + (end - begin) // tiles * tiles
            for first in cutlass.range(begin, rest, tiles, unroll=1):
                for step in cutlass.range(first, first + tiles, unroll=1):
                    state = self.step(rings, mma, state, order.at(step) if masked else order.full_at(step), masked)
                state = self.promote(rings, mma, state)
        for step in cutlass.range(rest, end, unroll=1):
            state = self.step(rings, mma, state, order.at(step) if masked else order.full_at(step), masked)
        return state

    @cute.jit
    def promote(self, rings: SmemRings, mma: cutlass.Constexpr, state: cutlass.Constexpr) -> Any:
        """Adds O to the sums in shared memory. Rows with small sums, which are dominated by one peak, are raised in the
        range of e4m3, so that probabilities far below the peak no longer underflow.
        """
        out = self.sums(rings).add(state.out)
        exponents = mma.softmax.headroom(state.total)
        p, shift, total = state.p, state.shift, state.total
        if cute.arch.vote_any_sync(cutlass.or_(*(exponent > Float32(0.0) for exponent in exponents))):
            factors = [ptx.exp2(exponent) for exponent in exponents]
            out = self.rescale_output(rings, out, factors)
            p = self.tile.scaled(p, factors)
            shift = [x + exponent for x, exponent in zip(shift, exponents, strict=True)]
            total = [x * factor for x, factor in zip(total, factors, strict=True)]
        return State(out, p, shift, total, state.k)

    def rescale_output(self, rings: Any, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        return self.sums(rings).scale(out, factors)

    def last_output(self, rings: Any, mma: MmaWork, state: State) -> list[Float32]:
        return self.sums(rings).plus(super().last_output(rings, mma, state))

    def sums(self, rings: Any) -> ThreadSums:
        return ThreadSums.of(self.tile, rings.scratch["sums"])


class Fp8Program(Fa3Program):
    """Hopper kernel for q, k and v in fp8."""

    memory: Fp8Memory
    tile: Fp8Tile
    rings_type = Fp8Rings
    mma_type = Fp8MmaWarpgroups
    transform_type = VTransposeWarps

    def warpgroup_tile(self, spec: Fa3Spec, memory: Fp8Memory) -> Fp8Tile:
        return Fp8Tile(spec.dtype, memory)

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: WarpgroupLanes, scale: Any) -> Fp8Softmax:
        scales = [Float32(ptx.LOG2E)] * 2 if self.spec.scores else self.row_scales(p, work, lanes)
        return Fp8Softmax(self.tile.scores_layout, scales)

    def scale_step(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes, scale: Any) -> RowScales:
        if isinstance(lanes, RematerializedLanes):
            return RowScales(self.tile.scores_layout, lambda: self.row_scales(p, work, lanes))
        scales = self.row_scales(p, work, lanes)
        return RowScales(self.tile.scores_layout, lambda: scales)

    def scores(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes, scale: Any) -> Scores:
        return super().scores(p, work, RematerializedLanes() if self.spec.mask == "packed" else lanes, scale)

    def mask(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes) -> BandMask:
        return super().mask(p, work, RematerializedLanes() if self.spec.mask == "packed" else lanes)

    def row_scales(self, p: PersistentParams, work: QueryTile, lanes: AnyLanes) -> list[Float32]:
        """Returns the scales of scores, positive because `prepare_q` flips rows of negative scale."""
        rows, scales = work.rows(p), []
        for slot in self.tile.scores_layout.slots:
            scale = row_scale(p, work, rows.head(lanes.row(slot)))
            scales.append(ptx.fmax(ptx.magnitude(scale), Float32(MIN_SCALE)))
        return scales

    @cute.jit
    def prepare_q(
        self, p: AnyParams, work: cutlass.Constexpr, lanes: WarpgroupLanes, q_rows: Int32, scale: Float32
    ) -> Float32:
        """Flips the sign of q rows whose scale is negative, since softmax needs positive scales. wgmma reads the 16
        rows of a warp for that warp alone, so a warp barrier suffices.
        """
        row = lanes.warp * 16 + lanes.lane // 2
        negative = row_scale(p, work, work.rows(p).head(lanes.warpgroup * WARPGROUP_ROWS + row)) < Float32(0.0)
        if cute.arch.vote_any_sync(negative):
            if negative:
                half = q_rows + row * LINE + lanes.lane % 2 * (LINE // 2)
                for column in cutlass.range_constexpr(self.memory.qk_columns):
                    for i in cutlass.range_constexpr(4):
                        offset = column * self.spec.tile.rows * LINE + 16 * i
                        words = ptx.ld_shared_v4(half, offset)
                        ptx.st_shared_v4(half, offset, [word ^ Int32(SIGNS) for word in words])
            tma.fence_async()
            ptx.sync_warp()
        return scale

    def epilogues(self, p: PersistentParams, work: QueryTile) -> tuple[FinalEpilogue, ScaledPartialEpilogue]:
        return scaled_epilogues(p, work)
