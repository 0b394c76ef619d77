"""Warp of the products, with the operands swapped: tokens or head dims are the M of a product, query rows its N.

    S^T [128 tokens, terms of rows] = K Q^T        A: K as stored, K-major; B: Q
    O^T [dims, terms of rows]      += V^T P        A: V as stored, MN-major; B: P with lines per token, MN-major

S^T of a tile is started before O^T of the tile before, so that it is ready when softmax is.

A slot of scores needs no barrier of its own to be free again: P of its tile is full, for which the product before has
waited. Nor do the outputs: P of the first tile of a segment follows the end of the segment before.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import sm100, tma
from cute_attn.kernels.blocks.pipeline import PipelineState, Rings, WarpRole, start
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.parts.partition import Partition
from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

STEP_BYTES = 32  # of an operand's row per instruction


class MmaState(NamedTuple):
    """Pipeline states of all rings."""

    kv: PipelineState
    q: PipelineState
    s: PipelineState
    p: PipelineState
    o: PipelineState


class MmaContext(NamedTuple):
    shared: Rings
    tmem: Int32
    elected: Int32


class MmaWarp:
    """Role of the warp of the products."""

    def __init__(self, spec: XqaUmmaSpec, memory: UmmaMemory) -> None:
        self.spec, self.memory = spec, memory
        self.kind = sm100.kind_of(spec.kv_operand)
        self.role = WarpRole("MMA", 1, fills={"s": 1, "o": 1}, reads=("kv", "q", "p"))

    @cute.jit
    def run(self, p: Any, shared: cutlass.Constexpr, tmem: Int32) -> None:
        """Starts the products of all segments of the CTA."""
        context = MmaContext(shared, tmem, sm100.elect_one())
        partition = Partition(p, self.spec)
        share, segment = partition.first_segment()
        state = MmaState(*(start() for _ in MmaState._fields))
        while partition.overlaps(segment, share):
            count = partition.split(segment, share).tiles
            if count > 0:
                state = self.run_split(context, state, count)
            segment = partition.next_segment(segment)

    @cute.jit
    def run_split(self, context: cutlass.Constexpr, state: MmaState, count: Int32) -> MmaState:
        """Starts all products of a split; each has its own Q and its own O."""
        q, o = context.shared.by_name["q"], context.shared.by_name["o"]
        q.wait_full(state.q)
        state = self.scores(context, state)
        for i in cutlass.range(1, count, unroll=1):
            state = self.scores(context, state)
            state = self.output(context, state, i > 1)
        sm100.commit(q.empty(state.q), context.elected)
        state = self.output(context, state, count > 1)
        sm100.commit(o.full(state.o), context.elected)
        return state._replace(q=q.next(state.q), o=o.next(state.o))

    def scores(self, context: MmaContext, state: MmaState) -> MmaState:
        """Starts S^T of the next tile of K."""
        spec, columns, line = self.spec, self.memory.score_columns, self.spec.line
        kv, q, s = (context.shared.by_name[name] for name in ("kv", "q", "s"))
        descriptor = sm100.instruction_descriptor(spec.cols, columns, spec.kv_operand, spec.q_operand)
        target = context.tmem + s.slot(state.s) * columns
        piece_bytes, ring_state = spec.piece_dim * spec.item_bytes, state.kv
        for piece in range(spec.pieces):
            self.wait_loaded(kv, ring_state)
            steps = []
            for step in range(0, piece_bytes, STEP_BYTES):
                column, within = step // line, step % line
                q_column = piece * piece_bytes // line + column
                steps.append((column * spec.cols * line + within, q_column * columns * line + within))
            a, b = (sm100.matrix_descriptor(x, line=line) for x in (kv.address(ring_state), q.address(state.q)))
            sm100.mma(self.kind, target, a, b, descriptor, steps, context.elected, accumulate=piece > 0)
            sm100.commit(kv.empty(ring_state), context.elected)
            ring_state = kv.next(ring_state)
        sm100.commit(s.full(state.s), context.elected)
        return state._replace(kv=ring_state, s=s.next(state.s))

    def output(self, context: MmaContext, state: MmaState, accumulate: Boolean) -> MmaState:
        """Starts O^T (+)= V^T P of the tile of V that follows."""
        spec, columns = self.spec, self.memory.output_columns
        kv, p = context.shared.by_name["kv"], context.shared.by_name["p"]
        p.wait_full(state.p)
        # Behind what softmax has read of tensor memory, which this product and the next scores replace.
        sm100.fence_after_sync()
        descriptor = sm100.instruction_descriptor(
            spec.piece_dim, columns, spec.kv_operand, spec.p_operand, a_mn_major=True, b_mn_major=True
        )
        steps = [(i * spec.line, i * LINE) for i in range(0, spec.cols, STEP_BYTES // spec.item_bytes)]
        ring_state = state.kv
        for piece in range(spec.pieces):
            self.wait_loaded(kv, ring_state)
            target = context.tmem + Int32(self.memory.output_column + piece * columns)
            a = sm100.matrix_descriptor(kv.address(ring_state), spec.cols * spec.line, spec.line)
            b = sm100.matrix_descriptor(p.address(state.p), spec.cols * LINE)
            sm100.mma(self.kind, target, a, b, descriptor, steps, context.elected, accumulate=accumulate)
            sm100.commit(kv.empty(ring_state), context.elected)
            ring_state = kv.next(ring_state)
        sm100.commit(p.empty(state.p), context.elected)
        return state._replace(kv=ring_state, p=p.next(state.p))

    def wait_loaded(self, kv: Any, state: PipelineState) -> None:
        """Waits for a slot. Copies into it go through the generic proxy, as those of Q by the same threads before."""
        kv.wait_full(state)
        tma.fence_async()
