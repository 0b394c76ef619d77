"""Softmax warps: a token per thread, query rows are the columns of S^T. They also write the output of a segment.

Columns have anchors that trail their maxima, as in the other kernels: a tile is searched for maxima only where a score
exceeds an anchor by 2^SLACK (`blocks.softmax`), or where some column has seen no token yet. Most tiles need one vote of
all warps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100, tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.pipeline import PipelineState, Rings, WarpRole, start
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.blocks.softmax import add, tree
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.parts.masks import TokenMask
from cute_attn.kernels.xqa.parts.merge import StateMerge
from cute_attn.kernels.xqa.parts.partition import KvSplit, Partition
from cute_attn.kernels.xqa.parts.softmax import log2_scale
from cute_attn.kernels.xqa.parts.team import LoneWarp
from cute_attn.kernels.xqa.umma.operands import probabilities
from cute_attn.kernels.xqa.umma.smem import SOFTMAX_WARPS, UmmaMemory
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

THREADS = 32 * SOFTMAX_WARPS
VOTE_BARRIER, SYNC_BARRIER = 1, 2  # named
CHUNK_COLUMNS = 32  # that are reduced at a time
OUTPUT_COLUMNS = 16  # of O^T that are loaded at a time
HELD_ROWS = 32  # up to which a thread holds all anchors in registers


class SoftmaxState(NamedTuple):
    """Pipeline states, this thread's sums per column, negated anchors of up to `HELD_ROWS` columns, whether the column
    of this thread's number has no anchor yet, and whether any has none.

    Rings of one slot move on with a ring of two: their states take no registers.
    """

    s: PipelineState
    q: PipelineState
    totals: list[Float32]
    shifts: list[Float32]
    unset: Boolean
    search: Boolean

    @property
    def p(self) -> PipelineState:
        return PipelineState(self.s.index_phase & 1)

    @property
    def o(self) -> PipelineState:
        return PipelineState(self.q.index_phase & 1)


@dataclass(frozen=True)
class SoftmaxContext:
    """What the tiles of a segment have in common. `tmem`: address of the warp's lanes."""

    shared: Rings
    tmem: Int32
    scale: Float32
    mask: TokenMask


class SoftmaxWarps:
    """Role of the softmax warps, the first of the CTA."""

    def __init__(self, spec: XqaUmmaSpec, memory: UmmaMemory) -> None:
        self.spec, self.memory = spec, memory
        self.probabilities = probabilities(spec)
        reads = ("q",) if spec.q_terms > 1 else ()
        self.role = WarpRole("softmax", SOFTMAX_WARPS, fills={"p": SOFTMAX_WARPS}, reads=reads)

    @property
    def chunks(self) -> range:
        """First columns of the chunks of a tile's columns."""
        return range(0, self.spec.rows, CHUNK_COLUMNS)

    @property
    def chunk_columns(self) -> int:
        return min(self.spec.rows, CHUNK_COLUMNS)

    @cute.jit
    def run(self, p: Any, shared: cutlass.Constexpr, tmem: Int32) -> None:
        """Processes all segments of the CTA."""
        partition = Partition(p, self.spec)
        share, segment = partition.first_segment()
        scale = log2_scale(p) if self.spec.q_terms == 1 else Float32(1.0)  # else each segment has its own
        tmem = tmem + cute.arch.make_warp_uniform(ptx.thread_index() >> 5) * sm100.WARP_LANES
        state = self.start()
        self.clear_shifts(shared)
        tma.named_sync(Int32(SYNC_BARRIER), THREADS)
        while partition.overlaps(segment, share):
            split = partition.split(segment, share)
            if split.active:
                rows = partition.rows(segment)
                mask = TokenMask(p, rows, segment, self.spec)
                context = SoftmaxContext(shared, tmem, self.score_scale(shared, state, split, scale), mask)
                first = split.begin + segment.request.first_token // self.spec.cols
                for i in cutlass.range(0, split.tiles, unroll=1):
                    state = self.step(context, state, (first + i) * self.spec.cols, i > 0)
                merge = self.merge(p, shared)  # here, so that its scale is in no register before
                self.publish(context, merge, state, split)
                merge.write(rows, segment, share, split)
                state = self.next_segment(shared, state, split)
            segment = partition.next_segment(segment)

    def merge(self, p: Any, shared: Rings) -> StateMerge:
        finish = FinalEpilogue.of(p)
        return StateMerge(self.spec, p, self.memory, LoneWarp(), shared.base, finish, SYNC_BARRIER, THREADS)

    def start(self) -> SoftmaxState:
        totals = [Float32(0.0) for _ in range(self.spec.rows)]
        shifts = [Float32(0.0) for _ in range(self.spec.rows if self.spec.rows <= HELD_ROWS else 0)]
        return SoftmaxState(start(), start(), totals, shifts, Boolean(True), Boolean(True))

    def next_segment(self, shared: Rings, state: SoftmaxState, split: KvSplit) -> SoftmaxState:
        following = shared.by_name["q"].next(state.q)
        index_phase = ptx.select(split.tiles > 0, following.index_phase, state.q.index_phase)
        return self.start()._replace(s=state.s, q=PipelineState(index_phase))

    @cute.jit
    def score_scale(self, shared: cutlass.Constexpr, state: SoftmaxState, split: KvSplit, scale: Float32) -> Float32:
        """Returns the factor from products to base-2 exponents of a segment."""
        if cutlass.const_expr(self.spec.q_terms > 1):  # noqa: SIM102  (one when tracing, one at run time)
            if split.begin < split.end:
                ring = shared.by_name["q"]
                ring.wait_full(state.q)
                scale = ptx.ld_shared_f32(shared.scratch["q_scales"] + ring.slot(state.q) * 4)
                ptx.sync_warp()
                ring.release(state.q, ptx.thread_index() & 31)
        return scale

    @cute.jit
    def clear_shifts(self, shared: cutlass.Constexpr) -> None:
        thread = ptx.thread_index()
        if thread < self.spec.rows:
            ptx.st_shared_f32(shared.scratch["shifts"] + thread * 4, 0, Float32(0.0))

    # --- a tile -----------------------------------------------------------------------------------------------------

    @cute.jit
    def step(
        self, context: cutlass.Constexpr, state: SoftmaxState, first_token: Int32, has_output: Boolean
    ) -> SoftmaxState:
        """Computes P of the tile from `first_token`; `has_output`: O^T has the tiles before."""
        shared = context.shared
        s, p = shared.by_name["s"], shared.by_name["p"]
        s.wait_full(state.s)
        sm100.fence_after_sync()
        x = [Float32(0.0) for _ in range(self.spec.rows)]
        limit, search, pending = Float32(self.probabilities.limit), state.search, Boolean(True)
        while pending:
            x = self.exponents(context, state, first_token)
            exceeds = tree(ptx.fmax, x) > limit
            pending = tma.any_of_warpgroup(Int32(VOTE_BARRIER), cutlass.or_(exceeds, search))
            if pending:
                state = self.raise_anchors(context, state, x, has_output)
                # At most once: even infinite scores do not exceed the limit then.
                limit, search = Float32(float("inf")), Boolean(False)
        values = [ptx.exp2(value) for value in x]
        totals = self.add(state.totals, values)
        p.wait_empty(state.p)
        self.store(p.address(state.p), values)
        sm100.fence_before_sync()
        tma.fence_async()
        ptx.sync_warp()
        p.fill(state.p, ptx.thread_index() & 31)
        return state._replace(s=s.next(state.s), totals=totals)

    @cute.jit
    def exponents(self, context: cutlass.Constexpr, state: SoftmaxState, first_token: Int32) -> list[Float32]:
        """Returns the base-2 exponents of this token's probabilities, -inf where rows do not see it."""
        scale, exponents = sm100.pair(context.scale, context.scale), []
        x = self.scores(context, state.s)
        for first in cutlass.range_constexpr(0, self.spec.rows, 4):
            shifts = self.shifts(context.shared, state, first)
            for i in cutlass.range_constexpr(0, 4, 2):
                scores_pair = sm100.pair(x[first + i], x[first + i + 1])
                shift = sm100.pair(shifts[i], shifts[i + 1])
                exponents += sm100.halves(sm100.fma_pair(scores_pair, scale, shift))
        if context.mask.masks_part_of(first_token):
            exponents = context.mask.apply(exponents, first_token + ptx.thread_index())
        return exponents

    def scores(self, context: SoftmaxContext, s: PipelineState) -> list[Float32]:
        """Loads this token's scores; the terms of Q have columns of their own."""
        at = context.tmem + context.shared.by_name["s"].slot(s) * self.memory.score_columns
        return [x for first in self.chunks for x in self.load_sum(at, first, self.chunk_columns, self.spec.q_terms)]

    def load_sum(self, address: Int32, first: int, size: int, terms: int) -> list[Float32]:
        """Loads `size` columns from `first`, the sums of as many terms, which have `rows` columns each."""
        offsets = (term * self.spec.rows + first for term in range(terms))
        loads = [sm100.load_columns(address, offset, size) for offset in offsets]
        loaded = sm100.wait_loads([x for load in loads for x in load])
        values = loaded[:size]
        for i in range(size, len(loaded), size):
            values = self.add(values, loaded[i : i + size])
        return values

    def shifts(self, shared: Rings, state: SoftmaxState, first: int) -> list[Float32]:
        """Returns the negated anchors of four columns."""
        if state.shifts:
            return state.shifts[first : first + 4]
        return ptx.ld_shared_v4_f32(shared.scratch["shifts"], first * 4)

    def add(self, totals: list[Float32], p: list[Float32]) -> list[Float32]:
        sums = []
        for i in range(0, len(p), 2):
            pairs = sm100.pair(totals[i], totals[i + 1]), sm100.pair(p[i], p[i + 1])
            sums += sm100.halves(sm100.add_pair(*pairs))
        return sums

    def store(self, slot: Int32, p: list[Float32]) -> None:
        """Stores this token's probabilities to its lines."""
        line, line_chunks = slot + swizzled(ptx.thread_index(), Int32(0), LINE), LINE // CHUNK
        for chunk, words in self.probabilities.chunks(p):
            column = chunk // line_chunks * (self.spec.cols * LINE)
            ptx.st_shared_v4(line ^ Int32(chunk % line_chunks * CHUNK), column, words)

    # --- anchors ----------------------------------------------------------------------------------------------------

    @cute.jit
    def raise_anchors(
        self, context: cutlass.Constexpr, state: SoftmaxState, x: list[Float32], has_output: Boolean
    ) -> SoftmaxState:
        """Moves the anchors of columns whose maximum exceeds the slack, or which have none, to the maximum of the tile
        less `offset`; rescales sums and outputs.
        """
        shared, thread = context.shared, ptx.thread_index()
        self.share_columns(shared, ptx.fmax, x)
        unset = cutlass.and_(state.unset, thread < self.spec.rows)
        if thread < self.spec.rows:
            high = tree(ptx.fmax, self.shared_columns(shared, thread))
            first = cutlass.and_(unset, high > Float32(ptx.NEG_INF))
            moves = cutlass.or_(high > Float32(self.probabilities.limit), first)
            delta = ptx.select(moves, Float32(self.probabilities.offset) - high, Float32(0.0))
            at = thread * 4
            shift = ptx.ld_shared_f32(shared.scratch["shifts"] + at)
            ptx.st_shared_f32(shared.scratch["shifts"] + at, 0, shift + delta)
            # Before the first token there is nothing to rescale, but the factor might be infinite.
            factor = ptx.select(unset, Float32(1.0), ptx.exp2(delta))
            ptx.st_shared_f32(shared.scratch["factors"] + at, 0, factor)
            unset = cutlass.and_(unset, first == Boolean(False))
        search = tma.any_of_warpgroup(Int32(VOTE_BARRIER), unset)  # the factors are visible, too
        totals = []
        for first_column in cutlass.range_constexpr(0, self.spec.rows, 4):
            factors = ptx.ld_shared_v4_f32(shared.scratch["factors"], first_column * 4)
            for i in cutlass.range_constexpr(4):
                totals += [state.totals[first_column + i] * factors[i]]
        if has_output:
            shared.by_name["p"].wait_empty(state.p)  # of one slot: the product of the tile before is complete
            sm100.fence_after_sync()
            self.rescale(context)
        shifts = []
        if cutlass.const_expr(len(state.shifts) > 0):
            for first_column in cutlass.range_constexpr(0, self.spec.rows, 4):
                shifts += ptx.ld_shared_v4_f32(shared.scratch["shifts"], first_column * 4)
        return state._replace(totals=totals, shifts=shifts, unset=unset, search=search)

    def rescale(self, context: SoftmaxContext) -> None:
        """Multiplies O^T by the factors of its columns."""
        for first in range(0, self.spec.pieces * self.memory.output_columns, OUTPUT_COLUMNS):
            at = context.tmem + Int32(self.memory.output_column + first)
            values, scaled = sm100.wait_loads(sm100.load_columns(at, 0, OUTPUT_COLUMNS)), []
            for i in range(0, OUTPUT_COLUMNS, 4):
                offset = (first % self.spec.rows + i) * 4
                factors = ptx.ld_shared_v4_f32(context.shared.scratch["factors"], offset)
                scaled += [x * factor for x, factor in zip(values[i : i + 4], factors, strict=True)]
            sm100.store_columns(at, 0, scaled)
        sm100.wait_stores()

    def share_columns(self, shared: Rings, op: Any, x: list[Float32]) -> None:
        """Reduces all columns over the tokens of each warp, to shared memory."""
        thread, size = ptx.thread_index(), self.chunk_columns
        columns = shared.scratch["columns"] + (thread >> 5) * (self.spec.rows * 4) + thread % size * 4
        for first in self.chunks:
            value = reduce_columns(op, x[first : first + size], thread & 31)
            ptx.st_shared_f32(columns + first * 4, 0, value)
        tma.named_sync(Int32(SYNC_BARRIER), THREADS)

    def shared_columns(self, shared: Rings, column: Int32) -> list[Float32]:
        """Returns what the warps have of a column."""
        at = shared.scratch["columns"] + column * 4
        return [ptx.ld_shared_f32(at + Int32(warp * self.spec.rows * 4)) for warp in range(SOFTMAX_WARPS)]

    # --- the end of a segment ---------------------------------------------------------------------------------------

    @cute.jit
    def publish(
        self, context: cutlass.Constexpr, merge: cutlass.Constexpr, state: SoftmaxState, split: KvSplit
    ) -> None:
        """Stores outputs and statistics to shared memory for the merge, and clears the anchors."""
        shared, o = context.shared, context.shared.by_name["o"]
        self.share_columns(shared, add, state.totals)
        if split.begin < split.end:
            o.wait_full(state.o)
            sm100.fence_after_sync()
            self.publish_outputs(context, merge)
        else:
            self.publish_zeros(shared)
        thread = ptx.thread_index()
        if thread < self.spec.rows:
            total = tree(add, self.shared_columns(shared, thread))
            shift = ptx.ld_shared_f32(shared.scratch["shifts"] + thread * 4)
            maximum = ptx.select(total == Float32(0.0), Float32(ptx.NEG_INF), Float32(0.0) - shift)
            ptx.st_shared_v2_f32(shared.scratch["stats"] + thread * 8, 0, [maximum, total])
        self.clear_shifts(shared)
        merge.sync()

    @cute.jit
    def publish_outputs(self, context: cutlass.Constexpr, merge: cutlass.Constexpr) -> None:
        """Stores this lane's dims of O^T. A product of 64 dims has the first 16 lanes of each warp."""
        thread, spec = ptx.thread_index(), self.spec
        lane, warp = thread & 31, thread >> 5
        warp_dims = spec.piece_dim // SOFTMAX_WARPS
        outputs = context.shared.scratch["outputs"]
        for piece in cutlass.range_constexpr(spec.pieces):
            dim = warp * warp_dims + lane + piece * spec.piece_dim
            for first in cutlass.range_constexpr(0, spec.rows, OUTPUT_COLUMNS):
                values = self.outputs(context, piece, first)
                if lane < warp_dims:
                    for i in cutlass.range_constexpr(OUTPUT_COLUMNS):
                        row = first + i
                        where = outputs + merge.swizzled_dim(dim, Int32(row)) * 4
                        ptx.st_shared_f32(where + Int32(row * spec.head_dim * 4), 0, values[i])

    def outputs(self, context: SoftmaxContext, piece: int, first: int) -> list[Float32]:
        """Loads columns of O^T; the terms of P have columns of their own."""
        at = context.tmem + Int32(self.memory.output_column + piece * self.memory.output_columns)
        return self.load_sum(at, first, OUTPUT_COLUMNS, self.spec.p_terms)

    @cute.jit
    def publish_zeros(self, shared: cutlass.Constexpr) -> None:
        outputs, zeros = shared.scratch["outputs"], [Float32(0.0) for _ in range(4)]
        for i in cutlass.range(ptx.thread_index(), self.spec.rows * self.spec.head_dim // 4, THREADS, unroll=1):
            ptx.st_shared_v4_f32(outputs + i * 16, 0, zeros)


def reduce_columns(op: Any, values: list[Float32], lane: Int32) -> Float32:
    """Reduces 16 or 32 values over all lanes; lane l returns value l modulo their number.

    Lanes that differ in one bit share the work: each passes on the half of the values that the other keeps.
    """
    if len(values) == 16:
        values = [op(x, ptx.shuffle_xor(x, 16)) for x in values]
    while len(values) > 1:
        half = len(values) // 2
        upper = lane & half != Int32(0)
        kept = []
        for low, high in zip(values[:half], values[half:], strict=True):
            keep, give = ptx.select(upper, high, low), ptx.select(upper, low, high)
            kept.append(op(keep, ptx.shuffle_xor(give, half)))
        values = kept
    return values[0]
