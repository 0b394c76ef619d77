"""A kernel with a parameter of each kind, to test compiling, caching and launching on."""

from typing import Any, NamedTuple, get_type_hints

from cutlass import Float32, Float64, Int32, Int64, const_expr, cute


class Params(NamedTuple):
    out: Int64  # fp32 [count]
    count: Int32
    scale: Float32
    offset: Float64
    bias: Int32


class SwappedParams(NamedTuple):
    """Params with two neighbours of one size exchanged: only their types tell."""

    out: Int64
    scale: Float32
    count: Int32
    offset: Float64
    bias: Int32


class ShortParams(NamedTuple):
    out: Int64
    count: Int32


class ToyProgram:
    """out[i] = scale * i + offset + bias for i < count.

    `wait`: behind a griddepcontrol.wait. `stack`: the value takes a trip through an array that must live in
    local memory.
    """

    scalars = get_type_hints(Params)
    smem_bytes = 64 * 1024  # over the 48 KB that need the driver's opt-in

    def __init__(self, threads: int, cluster: tuple[int, int, int], wait: bool, stack: bool) -> None:
        self.threads = threads
        self.block = (threads, 1, 1)
        self.cluster = cluster
        self.wait = wait
        self.stack = stack

    def compile_args(self) -> tuple[Any, ...]:
        params = Params(Int64(0), Int32(0), Float32(0.0), Float64(0.0), Int32(0))
        return params, Int32(1), Int32(1), Int32(1)

    @cute.kernel
    def kernel(self, p: Params) -> None:
        index = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if const_expr(self.wait):
            cute.arch.griddepcontrol_wait()
        if index < p.count:
            value = p.scale * Float32(index) + Float32(p.offset) + Float32(p.bias)
            if const_expr(self.stack):
                slots = cute.make_rmem_tensor(64, Float32)
                slots[index % 64] = value
                value = slots[p.count % 64]
            out = cute.make_ptr(Float32, p.out + Int64(index) * 4, cute.AddressSpace.gmem, assumed_align=4)
            cute.make_tensor(out, cute.make_layout(1))[0] = value

    @cute.jit
    def __call__(self, p: Params, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        grid, block = (grid_x, grid_y, grid_z), (self.threads, 1, 1)
        if const_expr(self.cluster == (1, 1, 1)):
            self.kernel(p).launch(grid=grid, block=block, smem=self.smem_bytes)
        else:
            self.kernel(p).launch(grid=grid, block=block, smem=self.smem_bytes, cluster=self.cluster)
