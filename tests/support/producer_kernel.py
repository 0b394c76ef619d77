"""A kernel that lets its dependent launch start at once, and writes what that launch reads only after a pause."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.ptx import asm

THREADS = 128


class Params(NamedTuple):
    rows: Int64  # int64 [grid][3]: addresses of target and source, words of 4 bytes
    pauses: Int32  # of a microsecond


class ProducerProgram(GridProgram):
    params = Params
    block = (THREADS, 1, 1)

    @cute.kernel
    def kernel(self, p: Params) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        for _ in cutlass.range(0, p.pauses, unroll=1):
            asm("nanosleep.u32 1000;")
        at = cute.make_ptr(
            Int64, p.rows + Int64(cute.arch.block_idx()[0]) * 24, cute.AddressSpace.gmem, assumed_align=8
        )
        row = cute.make_tensor(at, cute.make_layout(3))
        target, source, words = row[0], row[1], Int32(row[2])
        for word in cutlass.range(cute.arch.thread_idx()[0], words, THREADS, unroll=1):
            here = [cute.make_ptr(Float32, x + Int64(word) * 4, cute.AddressSpace.gmem) for x in (target, source)]
            to, out_of = [cute.make_tensor(at, cute.make_layout(1)) for at in here]
            to[0] = out_of[0]
