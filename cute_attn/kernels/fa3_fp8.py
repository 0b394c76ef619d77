"""The Hopper kernel for q, k and v in fp8: twice the products a clock, for operands contiguous along the sum.

V is not, so three warps beside the producer's transpose its tiles in shared memory:

    producer     K0 Q V0 K1 V1 K2 V2 ...
    transposers       V0'   V1'   V2' ...
    math group   S0 | S1 , O0 = P0 V0', softmax 1, O += O0 | S2 , O1 = P1 V1', softmax 2, O += O1 | ...
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90
from cute_attn.kernels.blocks.epilogue import Finish
from cute_attn.kernels.blocks.fp8 import (
    Fp8Softmax,
    Fp8Store,
    Fp8Tile,
    ScaledUnfinished,
    Transposition,
)
from cute_attn.kernels.blocks.persistent import QueryTile
from cute_attn.kernels.blocks.pipeline import Place, Ring, Shared
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.scalars import device_scale, head_scale
from cute_attn.kernels.blocks.wgmma import ROWS, GroupLanes
from cute_attn.kernels.fa3 import FIRST_VOTE, Fa3Params, MathWork, State
from cute_attn.kernels.fa3_helped import HELPER_BARRIER, HelpedProgram
from cute_attn.kernels.memory import LINE, Fp8Memory

LEAST_SCALE = 1e-30  # of scores: 0 would turn hidden ones into NaN
SIGNS = 0x80808080 - (1 << 32)


class Seen(NamedTuple):
    """`State` without its place."""

    out: list[Float32]
    p: list[Int32]
    shift: list[Float32]
    total: list[Float32]


@dataclass(frozen=True)
class Fp8Shared(Shared):
    arriving: Ring

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
        return Fp8Shared(common.q, common.k, transposed, common.records, arriving)

    def softmax(self, p: Fa3Params, work: QueryTile, lanes: GroupLanes, scale: Any) -> Fp8Softmax:
        rows, scales = work.rows(p), []
        for slot in range(2):
            row_scale = self.row_scale(p, work, rows.head(lanes.row(self.memory, slot)))
            scales.append(ptx.fmax(ptx.magnitude(row_scale), Float32(LEAST_SCALE)))
        return Fp8Softmax(self.tile, scales[0], scales)

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
        return Transposition(self.memory, warp, lane, self.helpers, HELPER_BARRIER)

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

    def first(self, shared: Shared, math: MathWork, k: Place) -> State:
        softmax = math.softmax
        shared.k.wait_full(k)
        s = sm90.wgmma_wait(0, self.tile.scores(math.q, self.tile.k_operand(shared.k.address(k))))
        shared.k.release(k, math.lanes.lane)
        kv_start = math.order.at(math.skipped) * self.spec.tile.cols
        s = math.mask.apply(s, kv_start)
        shift = softmax.first_shift(s)
        p = softmax.exponentials(s, shift, may_be_empty=True)
        total = softmax.sums(p, [Float32(0.0) for _ in range(2)])
        out = self.tile.zeros(self.tile.d_blocks)
        return State(out, self.tile.probabilities(p), shift, total, shared.k.next(k))

    def step(self, shared: Shared, math: MathWork, state: State, kv_tile: Int32, masked: bool) -> State:
        """Scores of this kv tile, output of the one before it.

        In full tiles exponents are relative to the anchors of earlier ones: the maximum is not looked for. Sums tell
        afterwards where e4m3 cannot hold the probabilities, and the tile is done again: K stays in its slot till then.
        """
        k, v, lanes, softmax = state.k, shared.v.previous(state.k), GroupLanes.of(), math.softmax
        k_at = self.tile.k_operand(shared.k.address(k))
        shared.k.wait_full(k)
        self.await_turn(lanes)
        s = self.tile.scores(math.q, k_at)
        shared.v.wait_full(v)
        part = self.tile.product(state.p, self.tile.v_operand(shared.v.address(v)))
        self.end_turn(lanes)
        both = sm90.wgmma_wait(0, [*s, *part], state.p)
        s, part = both[: len(s)], both[len(s) :]
        shared.v.release(v, lanes.lane)
        seen = Seen([a + b for a, b in zip(state.out, part, strict=True)], state.p, state.shift, state.total)
        if masked:
            seen = self.exact(math, math.mask.apply(s, kv_tile * self.spec.tile.cols), seen, masked)
        else:
            p = softmax.exponentials(s, state.shift, may_be_empty=False)
            sums = softmax.sums(p, [Float32(0.0) for _ in range(2)])
            again = sm90.any_of_group(lanes.group + FIRST_VOTE, softmax.too_high(sums))
            seen = self.corrected(math, k_at, again, seen._replace(p=self.tile.probabilities(p)), sums)
        shared.k.release(k, lanes.lane)
        return State(*seen, shared.k.next(k))

    def exact(self, math: MathWork, s: list[Float32], before: Seen, masked: bool) -> Seen:
        softmax: Any = math.softmax
        shift, factors = softmax.follow(before.shift, s, may_be_empty=masked)
        s = softmax.exponentials(s, shift, may_be_empty=masked)
        total = softmax.sums(s, [t * factor for t, factor in zip(before.total, factors, strict=True)])
        out = [x * factors[i % 4 // 2] for i, x in enumerate(before.out)]
        return Seen(out, self.tile.probabilities(s), shift, total)

    @cute.jit
    def corrected(
        self,
        math: cutlass.Constexpr,
        k_at: Int32,
        again: Boolean,
        before: cutlass.Constexpr,
        sums: list[Float32],
    ) -> Any:
        out, p, shift = before.out, before.p, before.shift
        total = [x + y for x, y in zip(before.total, sums, strict=True)]
        if again:
            q, k = cute.arch.make_warp_uniform(math.q), cute.arch.make_warp_uniform(k_at)  # lest operands stay around
            s = sm90.wgmma_wait(0, self.tile.scores(q, k))
            out, p, shift, total = self.exact(math, s, before, False)
        return Seen(out, p, shift, total)

    def last_output(self, shared: Shared, math: MathWork, state: State) -> list[Float32]:
        v = shared.v.previous(state.k)
        shared.v.wait_full(v)
        part = self.tile.product(state.p, self.tile.v_operand(shared.v.address(v)))
        part = sm90.wgmma_wait(0, part, state.p)
        shared.v.release(v, math.lanes.lane)
        return [a + b for a, b in zip(state.out, part, strict=True)]
