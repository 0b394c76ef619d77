"""Combine kernel: merges the partial results of a split-KV launch. A warp, or all warps of a CTA, merge a (token, head)
row, or several in turn in a launch of fixed size (CUDA graphs), whose capacity is mostly above the number of rows.

Each split has stored its own normalised output and base-2 log-sum-exp in fp32. With M = max_s lse_s the merged row is
sum_s 2^(lse_s - M) o_s / sum_s 2^(lse_s - M), and lse = M + log2 of that sum. Four sums, each of every fourth split in
order, are added last, however many warps there are: bits depend on the number of splits only.
"""

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, store_numbers
from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.blocks.softmax import add
from cute_attn.kernels.combine.spec import WARPS, CombineSpec
from cute_attn.kernels.formats import FP8_DTYPES
from cute_attn.runtime.arch import named
from cute_attn.schedule.records import MERGE_INTS, Merge

IN_FLIGHT = 8  # partials that a warp loads side by side


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
    num_rows: Int32  # of all merge records and kv heads; the grid may be smaller
    warps_per_row: Int32  # 1 or WARPS
    v_scale: Float32
    lse_scale: Float32
    # schedule "items"
    merges: Int64
    num_kv_heads: Int32
    group: Int32
    rows_per_merge: Int32  # rows of a query tile that can exist
    slot_rows: Int32  # rows per slot of the partials


@dataclass(frozen=True)
class Row:
    """Output row and its partials: row `first` of the workspace, then every `step` rows."""

    exists: Boolean
    last: Boolean  # no row after this one exists; what follows the last of `num_rows` is not asked
    token: Int32
    head: Int32
    first: Int64
    step: Int64
    num_splits: Int32


def grid_row(p: CombineParams, index: Int32) -> Row:
    """Returns a row of one request, with partials [num_splits, qo_len, num_qo_heads]."""
    token = index // p.num_qo_heads
    head, step = index - token * p.num_qo_heads, Int64(p.qo_len) * Int64(p.num_qo_heads)
    return Row(Boolean(True), Boolean(False), token, head, Int64(index), step, p.num_splits)


def item_row(p: CombineParams, index: Int32) -> Row:
    """Returns a row of a batch, with partials [slot, num_kv_heads, slot_rows]; those of a merge item and kv head are
    contiguous.
    """
    merge_head = index // p.rows_per_merge
    row = index - merge_head * p.rows_per_merge
    number = merge_head // p.num_kv_heads
    kv_head = merge_head - number * p.num_kv_heads
    address = p.merges + Int64(number) * Int64(4 * MERGE_INTS)
    words = [word for offset in (0, 16) for word in ptx.ld_global_v4(address, offset)]
    merge = Merge(*words[: len(Merge._fields)])
    packed = merge.first_row + row
    token = packed // p.group
    step = Int64(p.num_kv_heads) * Int64(p.slot_rows)
    return Row(
        exists=packed < merge.qo_len * p.group,
        last=merge.qo_len == 0,  # empty records come after all others
        token=merge.qo_start + token,
        head=kv_head * p.group + packed - token * p.group,
        first=Int64(merge.first_partial) * step + Int64(kv_head) * Int64(p.slot_rows) + Int64(row),
        step=step,
        num_splits=merge.num_splits,
    )


class CombineProgram(GridProgram):
    params = CombineParams
    min_ctas = 0

    def __init__(self, spec: CombineSpec, arch: str) -> None:
        self.spec = spec
        self.block = (32 * WARPS, 1, 1)
        self.smem_bytes = WARPS * spec.head_dim_vo * 4
        self.row = grid_row if spec.schedule == "grid" else item_row
        self.pdl = named(arch).pdl

    @cute.kernel
    def kernel(self, params: CombineParams) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        if params.warps_per_row == 1:
            self.merge_rows(params, False)
        else:
            self.merge_rows(params, True)

    @cute.jit
    def merge_rows(self, p: CombineParams, shared: cutlass.Constexpr) -> None:
        """Merges the rows of this warp; or, if `shared`, those of the CTA, whose warps share their splits."""
        index, step = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.grid_dim()[0])
        if cutlass.const_expr(not shared):
            index, step = index * Int32(WARPS) + warp_index(), step * Int32(WARPS)
        remaining = index < p.num_rows
        while remaining:
            row = self.row(p, index)
            if row.exists:
                self.merge(p, row, shared)
            index = index + step
            remaining = cutlass.and_(index < p.num_rows, cutlass.not_(row.last))

    @cute.jit
    def merge(self, p: CombineParams, row: cutlass.Constexpr, shared: cutlass.Constexpr) -> None:
        lse = self.lane_values(p, row)
        maximum = ptx.reduce_lanes(ptx.fmax, reduce(ptx.fmax, lse))
        anchor = ptx.select(maximum == ptx.NEG_INF, Float32(0.0), maximum)
        weights = [ptx.exp2(x - anchor) for x in lse]
        total = ptx.reduce_lanes(add, reduce(add, weights))
        epilogue = FinalEpilogue.of(p)
        factor, merged = epilogue.row(maximum, total, row.head)
        thread = Int32(cute.arch.thread_idx()[0]) if shared else lane_index()
        if cutlass.and_(thread == 0, p.lse != Int64(0)):
            index = Int64(row.token) * Int64(p.num_qo_heads) + Int64(row.head)
            ptx.st_global_f32(p.lse + index * Int64(4), 0, merged)
        if cutlass.const_expr(shared):
            self.store_shared_sums(p, row, weights, factor)
        else:
            for start in cutlass.range_constexpr(0, self.spec.head_dim_vo, 128):
                sums = self.sums(p, row, weights, start, Int32(0), 1)
                self.store(p, row, thread * 4 + start, sums, factor)

    @cute.jit
    def store_shared_sums(
        self, p: CombineParams, row: cutlass.Constexpr, weights: list[Float32], factor: Float32
    ) -> None:
        """Sums splits w, w + WARPS, ... in warp w, adds the sums of the warps and stores, with the first dims / 4
        threads.
        """
        dims, base = self.spec.head_dim_vo, shared_memory()
        for start in cutlass.range_constexpr(0, dims, 128):
            dim = lane_index() * 4 + start
            (of_warp,) = self.sums(p, row, weights, start, warp_index(), WARPS)
            if dim < dims:
                ptx.st_shared_v4_f32(base + (warp_index() * dims + dim) * 4, 0, of_warp)
        ptx.sync_threads()
        dim = Int32(cute.arch.thread_idx()[0]) * 4
        mine = base + ptx.minimum(dim, Int32(dims - 4)) * 4
        self.store(p, row, dim, [ptx.ld_shared_v4_f32(mine, w * dims * 4) for w in range(WARPS)], factor)
        ptx.sync_threads()  # the next row's sums overwrite these

    @cute.jit
    def lane_values(self, p: CombineParams, row: cutlass.Constexpr) -> list[Float32]:
        """Loads the lse of splits lane, lane + 32, ...; -inf past the last split."""
        values = []
        for i in cutlass.range_constexpr(CombineSpec.max_splits // 32):
            split = lane_index() + 32 * i
            value = Float32(ptx.NEG_INF)
            if split < row.num_splits:
                offset = Int64(split) * row.step + row.first
                value = ptx.ld_global_f32(p.lse_partial + offset * Int64(4))
            values.append(value)
        return values

    @cute.jit
    def sums(
        self,
        p: CombineParams,
        row: cutlass.Constexpr,
        weights: list[Float32],
        start: cutlass.Constexpr,
        part: Int32,
        step: cutlass.Constexpr,
    ) -> list[list[Float32]]:
        """Returns WARPS / step weighted sums of splits `part`, `part` + `step`, ..., each of every fourth split: for
        this lane's 4 adjacent dimensions of the 128 from `start` on.
        """
        dims = self.spec.head_dim_vo
        # Lanes past the last dimension repeat it: the shuffles below need all of them.
        dim = ptx.minimum(lane_index() * 4 + start, Int32(dims - 4))
        source, of_split = p.o_partial + (row.first * Int64(dims) + Int64(dim)) * Int64(4), row.step * Int64(dims * 4)
        sums = [[Float32(0.0) for _ in range(4)] for _ in range(WARPS // step)]
        for first in cutlass.range(0, row.num_splits, IN_FLIGHT * step, unroll=1):
            held = self.weights_from(weights, first)
            splits = [first + part + i * step for i in range(IN_FLIGHT)]
            loaded = [ptx.ld_global_v4_f32_if(source + Int64(i) * of_split, i < row.num_splits) for i in splits]
            sums = with_parts(sums, [ptx.shuffle_from(held, i % 32) for i in splits], loaded)
        return sums

    def weights_from(self, weights: list[Float32], first: Int32) -> Float32:
        """Returns the lane's weight of the 32 splits that contain those from `first` on."""
        held = weights[-1]
        for i in reversed(range(len(weights) - 1)):
            held = ptx.select(first < 32 * (i + 1), weights[i], held)
        return held

    @cute.jit
    def store(
        self, p: CombineParams, row: cutlass.Constexpr, dim: Int32, sums: list[list[Float32]], factor: Float32
    ) -> None:
        """Adds four sums and stores 4 dimensions from `dim` on, in threads that have some."""
        if dim < self.spec.head_dim_vo:
            values = [reduce(add, list(four)) * factor for four in zip(*sums, strict=True)]
            destination = p.o + Int64(row.token) * p.o_stride_n + Int64(row.head) * p.o_stride_h
            size = 1 if self.spec.out_dtype in FP8_DTYPES else 4 if self.spec.out_dtype == "float32" else 2
            store_numbers(self.spec.out_dtype, destination + Int64(dim) * Int64(size), 0, values)


def with_parts(sums: list[list[Float32]], weights: list[Float32], parts: list[list[Float32]]) -> list[list[Float32]]:
    """Returns the sums, to which weighted parts are added in turn."""
    sums = [*sums]
    for i, (weight, part) in enumerate(zip(weights, parts, strict=True)):
        chain = i % len(sums)
        sums[chain] = [ptx.fma(x, weight, a) for x, a in zip(part, sums[chain], strict=True)]
    return sums


def lane_index() -> Int32:
    return Int32(cute.arch.thread_idx()[0]) % 32


def warp_index() -> Int32:
    return Int32(cute.arch.thread_idx()[0]) // 32
