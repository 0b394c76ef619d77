"""Decode over a paged cache on tcgen05 (sm_100a, sm_103a), for 16 packed query rows and more.

The operands are swapped as in the kernel on mma.sync, whose partition, merge and parameters this one has: tokens and
head dims are the M of the products, packed rows their N. A CTA has one ring of K and V:

    warps 0-3    softmax, a token per thread; the output of a segment, and its merge (`softmax_warps`)
    warp 4       products (`mma_warp`)
    warps 5, 6   producers: cp.async by token (`producer_warps`)
    warp 7       over caches of 8 bits: terms of Q, once per segment (`query_warp`)

K and V of 8 bits are operands as they are stored; Q and P become sums of fp8 operands.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx, sm100, tma
from cute_attn.kernels.blocks.pipeline import Rings, WarpRole
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.xqa.kernel import XqaParams
from cute_attn.kernels.xqa.umma.mma_warp import MmaWarp
from cute_attn.kernels.xqa.umma.producer_warps import WARPS as PRODUCER_WARPS
from cute_attn.kernels.xqa.umma.producer_warps import ProducerWarps
from cute_attn.kernels.xqa.umma.query_warp import QueryWarp
from cute_attn.kernels.xqa.umma.smem import SOFTMAX_WARPS, UmmaMemory
from cute_attn.kernels.xqa.umma.softmax_warps import SoftmaxWarps
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

MMA_WARP = SOFTMAX_WARPS
PRODUCER_WARP = MMA_WARP + 1
QUERY_WARP = PRODUCER_WARP + PRODUCER_WARPS


class XqaUmmaProgram(GridProgram):
    """The decode kernel of one spec."""

    params = XqaParams

    def __init__(self, spec: XqaUmmaSpec, arch: str) -> None:
        self.spec = spec
        self.memory = UmmaMemory(spec)
        self.softmax = SoftmaxWarps(spec, self.memory)
        self.mma = MmaWarp(spec, self.memory)
        self.query: Any = QueryWarp(spec, self.memory) if spec.q_terms > 1 else None
        self.producer = ProducerWarps(spec, self.memory)
        self.block = (32 * self.warps, 1, 1)
        self.smem_bytes = self.memory.bytes

    @property
    def roles(self) -> list[WarpRole]:
        roles = [self.softmax.role, self.mma.role, self.producer.role]
        return [*roles, self.query.role] if self.query else roles

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)

    @cute.kernel
    def kernel(self, params: XqaParams) -> None:
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint().to(Int32)
        shared = Rings.at(self.memory, base, {})
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread >> 5)
        self.prepare(shared, thread, warp)
        ptx.grid_dependency_wait()
        ptx.grid_dependency_launch()
        tmem = ptx.ld_shared_b32(shared.scratch["tmem"])
        self.run_warps(params, shared, tmem, thread)
        sm100.fence_before_sync()
        ptx.sync_threads()
        sm100.fence_after_sync()
        if warp == MMA_WARP:
            sm100.deallocate(tmem, self.memory.tmem_columns)

    @cute.jit
    def run_warps(self, params: XqaParams, shared: cutlass.Constexpr, tmem: Int32, thread: Int32) -> None:
        warp = cute.arch.make_warp_uniform(thread >> 5)
        producer = thread - Int32(32 * PRODUCER_WARP)
        if warp < MMA_WARP:
            self.softmax.run(params, shared, tmem)
        elif warp == MMA_WARP:
            self.mma.run(params, shared, tmem)
        elif cutlass.const_expr(self.query is None):  # noqa: SIM114  (one when tracing, one at run time)
            self.producer.run(params, shared, producer)
        elif warp < QUERY_WARP:
            self.producer.run(params, shared, producer)
        else:
            self.query.run(params, shared)

    @cute.jit
    def prepare(self, shared: cutlass.Constexpr, thread: Int32, warp: Int32) -> None:
        """Initialises barriers, and allocates tensor memory."""
        if thread == 0:
            shared.initialise(self.roles)
            tma.fence_barrier_init()
        if warp == MMA_WARP:
            sm100.allocate(shared.scratch["tmem"], self.memory.tmem_columns)
        sm100.fence_before_sync()
        ptx.sync_threads()
        sm100.fence_after_sync()
        if cutlass.const_expr(self.spec.piece_dim < self.spec.cols):
            self.clear_outputs(shared, warp)

    @cute.jit
    def clear_outputs(self, shared: cutlass.Constexpr, warp: Int32) -> None:
        """Writes lanes of O^T that no product writes, but that are loaded with the others by the same warps."""
        if warp < SOFTMAX_WARPS:
            at = ptx.ld_shared_b32(shared.scratch["tmem"]) + warp * sm100.WARP_LANES
            zeros = [Float32(0.0) for _ in range(self.spec.rows)]
            for term in cutlass.range_constexpr(self.spec.p_terms):
                sm100.store_columns(at, self.memory.output_column + term * self.spec.rows, zeros)
            sm100.wait_stores()
