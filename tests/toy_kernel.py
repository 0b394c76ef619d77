"""A kernel with one parameter of each kind, to test compiling, caching and launching without the real kernels."""

from typing import NamedTuple

from cutlass import Float32, Float64, Int32, Int64, const_expr, cute


class Params(NamedTuple):
    out: Int64  # fp32 [count]
    count: Int32
    scale: Float32
    offset: Float64
    bias: Int32


class ToyProgram:
    """out[i] = scale * i + offset + bias for i < count; with `wait`, behind a griddepcontrol.wait."""

    params = Params
    smem_bytes = 64 * 1024  # over the 48 KB that need the driver's opt-in

    def __init__(self, threads: int, wait: bool, cluster: tuple[int, int, int]) -> None:
        self.block = (threads, 1, 1)
        self.wait = wait
        self.cluster = cluster

    def compile_args(self) -> tuple:
        params = Params(Int64(0), Int32(0), Float32(0.0), Float64(0.0), Int32(0))
        return params, Int32(1), Int32(1), Int32(1)

    @cute.kernel
    def kernel(self, p: Params):
        index = cute.arch.block_idx()[0] * self.block[0] + cute.arch.thread_idx()[0]
        if const_expr(self.wait):
            cute.arch.griddepcontrol_wait()
        if index < p.count:
            out = cute.make_ptr(Float32, p.out + Int64(index) * 4, cute.AddressSpace.gmem, assumed_align=4)
            value = p.scale * Float32(index) + Float32(p.offset) + Float32(p.bias)
            cute.make_tensor(out, cute.make_layout(1))[0] = value

    @cute.jit
    def __call__(self, p: Params, grid_x: Int32, grid_y: Int32, grid_z: Int32):
        grid = (grid_x, grid_y, grid_z)
        if const_expr(self.cluster == (1, 1, 1)):
            self.kernel(p).launch(grid=grid, block=self.block, smem=self.smem_bytes)
        else:
            self.kernel(p).launch(grid=grid, block=self.block, smem=self.smem_bytes, cluster=self.cluster)
