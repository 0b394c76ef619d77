"""The same over caches of 8 bits: K and V are operands as they are stored, Q and P become sums of fp8 operands.

warps 0-3    softmax
warp 4       products
warps 5, 6   producers: K and V
warp 7       terms of Q, once per segment
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks.roles import WarpRole
from cute_attn.kernels.xqa.kernel import XqaParams
from cute_attn.kernels.xqa.umma.kernel import PRODUCER_WARP, XqaUmmaProgram
from cute_attn.kernels.xqa.umma.producer_warps import WARPS as PRODUCER_WARPS
from cute_attn.kernels.xqa.umma.producer_warps import ProducerWarps
from cute_attn.kernels.xqa.umma.query_warp import QueryWarp
from cute_attn.kernels.xqa.umma.smem import UmmaMemory
from cute_attn.kernels.xqa.umma.spec import XqaUmmaSpec

QUERY_WARP = PRODUCER_WARP + PRODUCER_WARPS


class Fp8UmmaProgram(XqaUmmaProgram):
    """The decode kernel of one spec with K and V of 8 bits."""

    producers = ProducerWarps

    def __init__(self, spec: XqaUmmaSpec, arch: str) -> None:
        self.query = QueryWarp(spec, UmmaMemory(spec))
        super().__init__(spec, arch)

    @property
    def roles(self) -> list[WarpRole]:
        return [*super().roles, self.query.role]

    @cute.jit
    def run_others(self, params: XqaParams, shared: cutlass.Constexpr, thread: Int32) -> None:
        warp = cute.arch.make_warp_uniform(thread >> 5)
        if warp < QUERY_WARP:
            self.producer.run(params, shared, thread - Int32(32 * PRODUCER_WARP))
        else:
            self.query.run(params, shared)
