"""The same over fp8 caches under 16-bit q: transform warps convert K and V to fp16 operands, and rows of bf16 q.

warps 0-3    softmax
warp 4       products
warps 5, 6   producers: tiles as stored into the ring "staged"
warps 8-11   transform: pieces of K and V in the order of their use, and Q once per segment
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.kv_dequant import (
    Fp8KvDequant,
    StoredRows,
    largest_magnitude,
    normalized,
    normalizing_factors,
)
from cute_attn.kernels.blocks.pipeline import PipelineState, start
from cute_attn.kernels.blocks.roles import WarpRole
from cute_attn.kernels.xqa.kernel import XqaParams
from cute_attn.kernels.xqa.parts.partition import Partition, kv_split
from cute_attn.kernels.xqa.umma.kernel import MMA_WARP, PRODUCER_WARP, XqaUmmaProgram
from cute_attn.kernels.xqa.umma.producer_warps import WARPS as PRODUCER_WARPS
from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec
from cute_attn.kernels.xqa.umma.work import UmmaShared, tile_count

WARPS = 4
THREADS = 32 * WARPS
TRANSFORM_WARP = 8
BARRIER = 3  # named, of the transform warps
SOFTMAX_REGISTERS, OTHER_REGISTERS = 248, 128  # of a thread; a launch of 12 warps gives each 168


class TransformWarps:
    """Role of the transform warps."""

    def __init__(self, spec: XqaUmmaSpec, memory: UmmaMemory) -> None:
        self.spec, self.memory = spec, memory
        fills = {"kv": WARPS, **({"normalized": WARPS} if spec.normalizes_q else {})}
        self.role = WarpRole("transform", WARPS, fills, reads=("staged",))

    @cute.jit
    def run(self, p: Any, shared: cutlass.Constexpr, thread: Int32) -> None:
        """Converts what the producers load. `thread`: of the transform warps."""
        partition = Partition(p, self.spec.cols)
        share, segment = partition.first_segment()
        warp, lane = cute.arch.make_warp_uniform(thread >> 5), thread & 31
        rows = StoredRows(
            self.spec.piece_dim * 2 // 128, self.spec.piece_dim, Fp8(self.spec.operand, self.spec.kv_dtype, native=True)
        )
        dequant = Fp8KvDequant(self.spec.cols, warp, lane, WARPS, rows, rows)
        staged, kv, q = start(), start(), start()
        while partition.overlaps(segment, share):
            count = tile_count(kv_split(segment, share))
            if count > 0:
                if cutlass.const_expr(self.spec.normalizes_q):
                    self.normalize(shared, q, thread)
                    q = shared.ring("q").next(q)
                for _piece in cutlass.range(0, count * (2 * self.spec.pieces), unroll=1):
                    staged, kv = self.convert(shared, dequant, staged, kv)
            segment = partition.next_segment(segment)

    def convert(
        self, shared: UmmaShared, dequant: Fp8KvDequant, staged: PipelineState, kv: PipelineState
    ) -> tuple[PipelineState, PipelineState]:
        """Converts the next piece, of K or of V."""
        source, target = shared.ring("staged"), shared.ring("kv")
        source.wait_full(staged)
        target.wait_empty(kv)
        dequant.run(dequant.k, source.address(staged), target.address(kv))
        tma.fence_async()
        ptx.sync_warp()
        source.release(staged, dequant.lane)
        self.publish(target.full(kv), dequant.lane)
        return source.next(staged), target.next(kv)

    @cute.jit
    def publish(self, barrier: Int32, lane: Int32) -> None:
        if lane == 0:
            tma.barrier_arrive(barrier)

    @cute.jit
    def normalize(self, shared: cutlass.Constexpr, q: PipelineState, thread: Int32) -> None:
        """Converts the rows of a segment, in their slot, with one factor for all. That loses no more than 2^-39 of the
        largest number, so the rows of small ones lose nothing that their scores would show.
        """
        ring, told = shared.ring("q"), shared.ring("normalized")
        ring.wait_full(q)
        told.wait_empty(q)
        at, offsets = ring.address(q) + thread * 16, range(0, ring.slot_bytes, 16 * THREADS)
        words = [ptx.ld_shared_v4(at, offset) for offset in offsets]
        largest = Int32(0)
        for chunk in words:
            largest = largest_magnitude(chunk, largest)
        factor, inverse = normalizing_factors(self.largest_of_all(shared, largest, thread))
        for offset, chunk in zip(offsets, words, strict=True):
            ptx.st_shared_v4(at, offset, normalized(chunk, factor))
        self.store_factor(shared, told.slot(q), inverse, thread)
        tma.fence_async()
        ptx.sync_warp()
        self.publish(told.full(q), thread & 31)

    @cute.jit
    def store_factor(self, shared: cutlass.Constexpr, slot: Int32, factor: Float32, thread: Int32) -> None:
        if thread == 0:
            ptx.st_shared_f32(shared.scratch("q_factors") + slot * 4, factor)

    @cute.jit
    def largest_of_all(self, shared: cutlass.Constexpr, largest: Int32, thread: Int32) -> Int32:
        """Returns the largest number of all threads."""
        for lane_mask in (16, 8, 4, 2, 1):
            largest = ptx.maximum(largest, ptx.shuffle_xor_b32(largest, lane_mask))
        at = shared.scratch("q_largest")
        if thread & 31 == 0:
            ptx.st_shared_b32(at + (thread >> 5) * 4, 0, largest)
        tma.named_sync(Int32(BARRIER), THREADS)
        for warp in cutlass.range_constexpr(WARPS):
            largest = ptx.maximum(largest, ptx.ld_shared_b32(at + 4 * warp))
        tma.named_sync(Int32(BARRIER), THREADS)  # before the next segment's numbers
        return largest


class Fp8UmmaProgram(XqaUmmaProgram):
    """The decode kernel of one spec with K and V of 8 bits."""

    def __init__(self, spec: XqaUmmaSpec, arch: str) -> None:
        self.transform = TransformWarps(spec, UmmaMemory(spec))
        super().__init__(spec, arch)

    @property
    def roles(self) -> list[WarpRole]:
        return [*super().roles, self.transform.role]

    @property
    def warps(self) -> int:
        return TRANSFORM_WARP + WARPS

    @cute.jit
    def run_warps(self, params: XqaParams, shared: cutlass.Constexpr, tmem: Int32, thread: Int32) -> None:
        warp = cute.arch.make_warp_uniform(thread >> 5)
        if warp < MMA_WARP:
            tma.claim_registers(SOFTMAX_REGISTERS)
            self.softmax.run(params, shared, tmem)
        else:
            tma.release_registers(OTHER_REGISTERS)
            if warp == MMA_WARP:
                self.mma.run(params, shared, tmem)
            elif warp < PRODUCER_WARP + PRODUCER_WARPS:
                self.producer.run(params, shared, thread - Int32(32 * PRODUCER_WARP))
            elif warp >= TRANSFORM_WARP:
                self.transform.run(params, shared, thread - Int32(32 * TRANSFORM_WARP))
