"""MMA warpgroups of the kernel on wgmma: two, which have the same 64 rows.

They take turns: tile t is of warpgroup t % 2, which computes its scores and its P. Each adds P V of every tile to its
half of the output columns, those of its own tiles with P in registers, the others with P in shared memory:

    warpgroup of t - 1      ... | S(t-1) | softmax | P to shared memory | O += P V (t-1) | O += P V (t) | S(t+1) | ...
    warpgroup of t          ...                                         | O += P V (t-1) | S(t) | softmax | ...

While one computes a softmax, the other keeps the tensor cores busy. Anchors go from one to the other beside P: each
rescales its outputs when it sees that they moved.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm90, tma
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.register_layout import FragmentPosition, MmaFragmentLayout, RowNumbers
from cute_attn.kernels.blocks.smem import swizzled
from cute_attn.kernels.blocks.softmax import Running, RunningSoftmax, add, any_of
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.mla.hopper.rings import Rings
from cute_attn.kernels.mla.parts.softmax import CausalMask
from cute_attn.kernels.mla.smem import HALVES, HopperMlaMemory
from cute_attn.kernels.mla.spec import LATENT, HopperMlaSpec
from cute_attn.kernels.xqa.parts.partition import KvSplit

SMALLEST = 2.0**-126  # normal fp32 number
P_BARRIER = 1  # named barriers: P of warpgroup 0, and of warpgroup 1
TOTALS_BARRIER = 3
BOTH = 256  # threads


@dataclass(frozen=True)
class WarpgroupPlace(FragmentPosition):
    """Where a thread is: its warpgroup has all rows and, of the outputs, half of the columns."""

    spec = HopperMlaSpec  # what all specs have in common
    dims = LATENT // 2  # output columns of the warpgroup
    scores = MmaFragmentLayout(1, spec.cols // 8)
    outputs = MmaFragmentLayout(1, dims // 8)
    warpgroup: Int32
    warp: Int32  # within the warpgroup
    lane: Int32

    @classmethod
    def of_thread(cls) -> "WarpgroupPlace":
        thread = ptx.thread_index()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return cls(warp >> 2, warp & 3, thread & 31)

    @property
    def first_row(self) -> Int32:
        return self.warp * 16


@dataclass(frozen=True)
class MmaWarpgroup:
    """One of the warpgroups."""

    memory: HopperMlaMemory
    rings: Rings
    base: Int32  # of shared memory
    scale: Float32  # from scores to base-2 exponents

    @property
    def place(self) -> WarpgroupPlace:
        """Where this thread is, found out at each use, so that nothing of it stays in registers in between."""
        return WarpgroupPlace.of_thread()

    @property
    def dtype(self) -> str:
        return self.memory.spec.dtype

    @property
    def softmax(self) -> RunningSoftmax:
        """The softmax of scores that are `oriented`. A scale of 0 becomes one that leaves hidden scores hidden."""
        place, scale = self.place, ptx.fmax(ptx.magnitude(self.scale), Float32(SMALLEST))
        return RunningSoftmax(place.scores, [scale for _ in place.scores.slots], output=place.outputs)

    @property
    def half(self) -> Ring:
        """Ring of the half of each tile that is this warpgroup's V operand."""
        return self.rings.half(self.place.warpgroup)

    @cute.jit
    def add_tiles(self, mask: CausalMask, split: KvSplit, state: PipelineState) -> Any:
        """Process the tiles of a segment, the first of which is in the slot of `state`."""
        running, tile, ring = self.softmax.start(), split.begin, self.half
        if cutlass.and_(self.place.warpgroup == 0, tile < split.end):
            s = sm90.wgmma_wait(0, self.scores(state))
            running = self.add_own(running, s, mask, tile, state)
            state, tile = ring.next(state), tile + 1
        for own in cutlass.range(tile + 1, split.end, 2, unroll=1):
            running = self.step(running, mask, own, state)
            state = ring.next(ring.next(state))
        # The last tile is the other's, or this warpgroup's own.
        left = (split.end - tile) & 1
        if left == 1:
            running = self.start_other(running, state)
            running = running._replace(out=sm90.wgmma_wait(0, running.out))
            ring.release(state, self.place.lane)
            state = ring.next(state)
        return running, state

    def step(self, running: Running, mask: CausalMask, own: Int32, state: PipelineState) -> Running:
        """Add the other warpgroup's tile, in the slot of `state`, and tile `own` behind it, whose scores are issued at
        once."""
        following = self.half.next(state)
        running = self.start_other(running, state)
        s = self.scores(following)
        running = running._replace(out=sm90.wgmma_wait(1, running.out))
        self.half.release(state, self.place.lane)
        return self.add_own(running, sm90.wgmma_wait(0, s), mask, own, following)

    # --- tiles of the other warpgroup --------------------------------------------------------------------------------

    def start_other(self, running: Running, state: PipelineState) -> Running:
        """Start adding P V of a tile whose P the other warpgroup makes."""
        place = self.place
        self.half.wait_full(state)
        tma.fence_async()
        tma.named_sync(P_BARRIER + (1 - place.warpgroup), BOTH)
        running = self.follow(
            running, self.numbers(self.memory.shifts).of_column(1 - place.warpgroup, place.scores.slots)
        )
        p = cute.arch.make_warp_uniform(sm90.descriptor(self.base + Int32(self.memory.p), 0))
        a = sm90.MatrixA([], p, [sm90.operand_offset(step, place.spec.rows) for step in range(place.spec.cols // 16)])
        return running._replace(out=self.accumulate(running.out, a, state))

    @cute.jit
    def follow(self, running: Running, shift: list[Float32]) -> Running:
        """Rescale outputs and sums where the other warpgroup has moved anchors."""
        moved = [new != old for new, old in zip(shift, running.shift, strict=True)]
        if cute.arch.vote_any_sync(any_of(moved)):
            softmax = self.softmax
            running = softmax.rescaled(running, softmax.moved(running.shift, shift, moved))
        return running

    # --- own tiles ---------------------------------------------------------------------------------------------------

    def add_own(
        self,
        running: Running,
        s: list[Float32],
        mask: CausalMask,
        tile: Int32,
        state: PipelineState,
    ) -> Running:
        """Compute P of a tile from its scores, hand it over, and add P V."""
        place, softmax, ring = self.place, self.softmax, self.half
        s = mask.apply(self.oriented(s), tile * place.spec.cols)
        running = self.softmax.raise_anchors(running, softmax.row_max(s))
        s = softmax.exponentials(s, running.shift, may_be_empty=True)
        p = ptx.pack_pairs(self.dtype, s)
        self.publish(p, running.shift)
        out = self.accumulate(running.out, sm90.MatrixA(p), state)
        running = running._replace(total=softmax.sums(s, running.total))
        out = sm90.wgmma_wait(0, out, p)
        ring.release(state, place.lane)
        return running._replace(out=out)

    def scores(self, state: PipelineState) -> list[Float32]:
        """Start S = Q K^T."""
        spec, columns = self.place.spec, self.memory.spec.columns
        for index in range(HALVES):
            self.rings.half(index).wait_full(state)
        tma.fence_async()  # once for both: it takes longer than the second wait
        q, k = (sm90.descriptor(address, 0) for address in (self.rings.q.data, self.half.address(state)))
        steps = range(columns // 16)
        a = sm90.MatrixA([], cute.arch.make_warp_uniform(q), [sm90.operand_offset(step, spec.rows) for step in steps])
        offsets = [sm90.operand_offset(step, spec.cols) for step in steps]
        k = cute.arch.make_warp_uniform(k)
        return sm90.wgmma(self.dtype, self.dtype, spec.cols, a, k, offsets, k_major=True)

    @cute.jit
    def oriented(self, s: list[Float32]) -> list[Float32]:
        """Negate scores under a negative scale: the largest then has the most weight."""
        if self.scale < Float32(0.0):
            s = [Float32(0.0) - x for x in s]
        return s

    def publish(self, p: list[Int32], shift: list[Float32]) -> None:
        """Leave P and the anchors for the other warpgroup."""
        place = self.place
        row, chunk = place.warp * 16 + (place.lane & 15), place.lane >> 4
        address = self.base + Int32(self.memory.p) + swizzled(row, chunk, LINE)
        for i in range(0, len(p), 4):
            sm90.stmatrix_x4(address ^ Int32(8 * i), 0, p[i : i + 4])
        self.numbers(self.memory.shifts).put(place.warpgroup, shift)
        tma.fence_async()
        tma.named_arrive(P_BARRIER + place.warpgroup, BOTH)

    # --- both --------------------------------------------------------------------------------------------------------

    def accumulate(self, out: list[Float32], p: sm90.MatrixA, state: PipelineState) -> list[Float32]:
        """Start O += P V."""
        place, memory = self.place, self.memory
        columns = place.warpgroup * (place.dims * 2 // LINE * memory.column_bytes)
        v = sm90.descriptor(self.half.address(state) + columns, memory.column_bytes)
        steps = range(0, place.spec.cols * LINE, 16 * LINE)
        return sm90.wgmma(self.dtype, self.dtype, place.dims, p, cute.arch.make_warp_uniform(v), steps, out)

    def numbers(self, offset: int) -> RowNumbers:
        """One number per row from each warpgroup."""
        return RowNumbers(self.base + Int32(offset), self.memory.spec.rows, self.place)

    def whole_totals(self, running: Running) -> list[Float32]:
        """Return the sums of rows over the tiles of both warpgroups."""
        mine, place = [self.place.scores.reduce(add, x) for x in running.total], self.place
        self.numbers(self.memory.totals).put(place.warpgroup, mine)
        tma.named_sync(Int32(TOTALS_BARRIER), BOTH)
        others = self.numbers(self.memory.totals).of_column(1 - place.warpgroup, place.scores.slots)
        tma.named_sync(Int32(TOTALS_BARRIER), BOTH)  # before either writes again
        return [a + b for a, b in zip(mine, others, strict=True)]
