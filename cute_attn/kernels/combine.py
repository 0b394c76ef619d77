"""Merges the partial results of a split-KV launch: one CTA a (token, head) row.

Each split left its own normalised output and base-2 log-sum-exp in fp32. With M = max_s lse_s the merged row is
sum_s 2^(lse_s - M) o_s / sum_s 2^(lse_s - M), and lse = M + log2 of that sum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import Finish
from cute_attn.kernels.blocks.scalars import device_scale, shared_memory, zeros
from cute_attn.kernels.spec import CombineSpec
from cute_attn.runtime.arch import named

WARPS = 4


class CombineParams(NamedTuple):
    """Kernel parameters, in order. Addresses are Int64, 0 where absent; strides are bytes."""

    o_partial: Int64
    lse_partial: Int64
    o: Int64
    lse: Int64
    v_scale_ptr: Int64
    sinks: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    qo_len: Int32
    num_qo_heads: Int32
    num_splits: Int32
    v_scale: Float32


@dataclass(frozen=True)
class Row:
    """One output row: its index among all (token, head) rows, and this thread's place in the CTA that merges it."""

    index: Int32
    count: Int32
    head: Int32
    warp: Int32
    lane: Int32


class CombineProgram:
    params = CombineParams

    def __init__(self, spec: CombineSpec, arch: str) -> None:
        self.spec = spec
        self.block = (32 * WARPS, 1, 1)
        self.smem_bytes = WARPS * spec.head_dim_vo * 4
        self.pdl = named(arch).pdl

    def compile_args(self) -> tuple[Any, ...]:
        return (zeros(CombineParams), Int32(1), Int32(1), Int32(1))

    @cute.jit
    def __call__(self, params: CombineParams, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        self.kernel(params).launch(grid=[grid_x, grid_y, grid_z], block=list(self.block), smem=self.smem_bytes)

    @cute.kernel
    def kernel(self, params: CombineParams) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        p, thread, index = params, cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        row = Row(index, p.qo_len * p.num_qo_heads, index % p.num_qo_heads, thread // 32, thread % 32)
        lse = self.lane_values(p, row)
        maximum = warp_reduce(ptx.fmax, fold(ptx.fmax, lse))
        anchor = ptx.select(maximum == ptx.NEG_INF, Float32(0.0), maximum)
        weights = [ptx.exp2(x - anchor) for x in lse]
        total = warp_reduce(add, fold(add, weights))
        factor, merged = Finish(p.sinks, p.v_scale * device_scale(p.v_scale_ptr)).row(maximum, total, row.head)
        if cutlass.and_(thread == 0, p.lse != Int64(0)):
            ptx.st_global_f32(p.lse + Int64(index) * Int64(4), merged)
        self.sum_outputs(p, row, weights)
        ptx.sync_threads()
        self.store(p, row, factor)

    @cute.jit
    def lane_values(self, p: CombineParams, row: Row) -> list[Float32]:
        """lse of splits lane, lane + 32, ...; -inf past the last split."""
        values = []
        for i in cutlass.range_constexpr(CombineSpec.max_splits // 32):
            split = row.lane + 32 * i
            value = Float32(ptx.NEG_INF)
            if split < p.num_splits:
                offset = Int64(split) * Int64(row.count) + Int64(row.index)
                value = ptx.ld_global_f32(p.lse_partial + offset * Int64(4))
            values.append(value)
        return values

    @cute.jit
    def sum_outputs(self, p: CombineParams, row: Row, weights: list[Float32]) -> None:
        """Warp w adds up splits w, w + 4, ... in that order; each lane has 4 neighbouring dimensions of every 128."""
        dims = self.spec.head_dim_vo
        base = shared_memory()
        step = Int64(row.count) * Int64(dims * 4)
        for start in cutlass.range_constexpr(0, dims, 128):
            # Lanes past the last dimension repeat it: the shuffles below need all of them.
            dim = ptx.minimum(row.lane * 4 + start, Int32(dims - 4))
            source = p.o_partial + (Int64(row.index) * Int64(dims) + Int64(dim)) * Int64(4)
            acc = [Float32(0.0) for _ in range(4)]
            for split in cutlass.range(row.warp, p.num_splits, WARPS, unroll=8):
                weight = self.weight_of(weights, split)
                part = ptx.ld_global_v4_f32(source + Int64(split) * step)
                acc = [ptx.fma(x, weight, a) for x, a in zip(part, acc, strict=True)]
            ptx.st_shared_v4_f32(base + (row.warp * dims + dim) * 4, 0, acc)

    def weight_of(self, weights: list[Float32], split: Int32) -> Float32:
        """From the lane that holds it; `split` is the same for all lanes of a warp."""
        held = weights[-1]
        for i in reversed(range(len(weights) - 1)):
            held = ptx.select(split < 32 * (i + 1), weights[i], held)
        return ptx.shuffle_from(held, split % 32)

    @cute.jit
    def store(self, p: CombineParams, row: Row, factor: Float32) -> None:
        """The first dims / 4 threads add the warps' sums and write."""
        dims = self.spec.head_dim_vo
        dim = (row.warp * 32 + row.lane) * 4
        if dim < dims:
            base = shared_memory() + dim * 4
            parts = [ptx.ld_shared_v4_f32(base, w * dims * 4) for w in range(WARPS)]
            values = [fold(add, list(four)) * factor for four in zip(*parts, strict=True)]
            token = row.index // p.num_qo_heads
            place = p.o + Int64(token) * p.o_stride_n + Int64(row.head) * p.o_stride_h
            if cutlass.const_expr(self.spec.out_dtype == "float32"):
                ptx.st_global_v4_f32(place + Int64(dim) * Int64(4), 0, values)
            else:
                pairs = [ptx.pack_16(self.spec.out_dtype, values[i], values[i + 1]) for i in (0, 2)]
                ptx.st_global_v2(place + Int64(dim) * Int64(2), 0, pairs)


def add(a: Float32, b: Float32) -> Float32:
    return a + b


def fold(op, values):  # type: ignore[no-untyped-def]
    result = values[0]
    for value in values[1:]:
        result = op(result, value)
    return result


def warp_reduce(op, x):  # type: ignore[no-untyped-def]
    for lane_mask in (1, 2, 4, 8, 16):
        x = op(x, ptx.shuffle_xor(x, lane_mask))
    return x
