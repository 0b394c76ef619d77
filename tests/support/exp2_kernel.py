"""A kernel whose threads compute exp2(x * scale + shift) of 32 scores each, and their sum, as on Blackwell."""

from typing import NamedTuple

from cutlass import Float32, Int64, cute

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.fa4.parts.exp2 import PairExp2

ROWS, COLUMNS = 128, 32


class Params(NamedTuple):
    x: Int64  # fp32 [ROWS, COLUMNS]
    p: Int64  # fp32 [ROWS, COLUMNS]
    sums: Int64  # fp32 [ROWS]
    scale: Float32
    shift: Float32


class Exp2Program(GridProgram):
    params = Params
    block = (ROWS, 1, 1)

    def __init__(self, polynomial: int) -> None:
        self.exp2 = PairExp2(polynomial)

    @cute.kernel
    def kernel(self, params: Params) -> None:
        thread = cute.arch.thread_idx()[0]
        offset = Int64(thread) * Int64(COLUMNS * 4)
        x = [ptx.ld_global_f32(params.x + offset + Int64(4 * i)) for i in range(COLUMNS)]
        p = self.exp2.exponentials(x, params.scale, params.shift)
        sums = self.exp2.add(self.exp2.zero_sums(), x, p)
        self.store(params.p + offset, p)
        ptx.st_global_f32(params.sums + Int64(thread) * Int64(4), 0, self.exp2.sum(sums))

    def store(self, address: Int64, p: list[Float32]) -> None:
        for i, x in enumerate(p):
            ptx.st_global_f32(address + Int64(4 * i), 0, x)
