"""A kernel whose threads own whole rows: masks, scores and softmax of scores in device memory. V is the identity, so
that its outputs are the probabilities."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, Target
from cute_attn.kernels.blocks.masks import Band, BandMask, PackedMask
from cute_attn.kernels.blocks.register_layout import RowLayout
from cute_attn.kernels.blocks.row_store import RowStore
from cute_attn.kernels.blocks.rows import Divisor, PackedRows
from cute_attn.kernels.blocks.scalars import zeros
from cute_attn.kernels.blocks.scores import Alibi, RowScales, Scores
from cute_attn.kernels.blocks.softmax import OnlineSoftmax

ROWS, COLUMNS = 128, 32  # of a tile; a row has two of them


class Params(NamedTuple):
    scores: Int64  # fp32 [ROWS, 2 COLUMNS]
    o: Int64
    lse: Int64
    sinks: Int64
    mask: Int64
    mask_bytes: Int64
    o_stride_n: Int64
    o_stride_h: Int64
    start: Int32
    qo_len: Int32
    kv_len: Int32
    group: Int32
    group_multiplier: Int32
    group_shift: Int32
    kv_head: Int32
    num_qo_heads: Int32
    left: Int32
    right: Int32
    scale: Float32
    v_scale: Float32
    lse_scale: Float32


@dataclass(frozen=True)
class ThreadRow:
    """Position of a thread that owns the tile's row of its index."""

    thread: Int32

    def row(self, slot: int) -> Int32:
        return self.thread

    def first_col(self) -> Int32:
        return Int32(0)

    def first_warp_col(self) -> Int32:
        return Int32(0)

    def lane_col(self) -> Int32:
        return Int32(0)


class RowProgram:
    params: type = Params
    smem_bytes = 0
    block = (ROWS, 1, 1)

    def __init__(self, out_dtype: str, mask: str, partial: bool) -> None:
        self.out_dtype, self.mask, self.partial = out_dtype, mask, partial
        self.layout = RowLayout(COLUMNS)

    def compile_args(self) -> tuple[Any, ...]:
        return zeros(Params), Int32(1), Int32(1), Int32(1)

    @cute.kernel
    def kernel(self, p: Params) -> None:
        layout, lanes = self.layout, ThreadRow(cute.arch.thread_idx()[0])
        group = Divisor(p.group, p.group_multiplier, p.group_shift)
        rows = PackedRows(Int32(0), p.qo_len * p.group, group, p.kv_head * p.group, p.start)
        scores = Scores([RowScales(layout, lambda: [p.scale]), Alibi(layout, rows, lanes, p.num_qo_heads)])
        mask = self.make_mask(p, rows, lanes)
        softmax = OnlineSoftmax(layout, [Float32(ptx.LOG2E)])
        s0, s1 = [
            mask.apply(scores.apply(self.load(p, lanes.row(0), col), Int32(col)), Int32(col)) for col in (0, COLUMNS)
        ]
        shift = softmax.first_shift(s0)
        p0 = softmax.exponentials(s0, shift, may_be_empty=True)
        sums = softmax.sums(softmax.exponentials(s1, softmax.finite(shift), may_be_empty=False), softmax.zero_sums())
        rescale = softmax.rescale_factors(shift, s1, sums)
        total = [x * f for x, f in zip(softmax.sums(p0, softmax.zero_sums()), rescale.factors, strict=True)]
        p1 = softmax.exponentials(s1, rescale.shift, may_be_empty=True)
        store = RowStore(layout, lanes, rows, *self.output(p))
        factor = store.write_lse(rescale.shift, softmax.sums(p1, total))
        store.write_columns(0, layout.scale_rows(p0, rescale.factors), factor)
        store.write_columns(COLUMNS, p1, factor)

    def make_mask(self, p: Params, rows: PackedRows, lanes: ThreadRow) -> BandMask:
        band = Band(p.kv_len, p.left, p.right)
        if self.mask == "packed":
            return PackedMask(band, self.layout, rows, lanes, p.mask, p.mask + p.mask_bytes, p.kv_len)
        return BandMask(band, self.layout, rows, lanes)

    def load(self, p: Params, row: Int32, col: int) -> list[Float32]:
        address = p.scores + Int64(row) * Int64(8 * COLUMNS)
        places = [address + Int64(4 * i) for i in range(col, col + COLUMNS, 4)]
        return [x for place in places for x in ptx.ld_global_v4_f32_if(place, Boolean(True))]

    def output(self, p: Params) -> tuple[Target | Partials, FinalEpilogue | PartialEpilogue]:
        if const_expr(self.partial):
            return Partials(p.o, p.lse, Int64(p.start), 2 * COLUMNS), PartialEpilogue()
        target = Target(self.out_dtype, p.o, p.o_stride_n, p.o_stride_h, p.lse, p.num_qo_heads)
        return target, FinalEpilogue(p.sinks, p.v_scale, p.lse_scale)

    @cute.jit
    def __call__(self, p: Params, grid_x: Int32, grid_y: Int32, grid_z: Int32) -> None:
        self.kernel(p).launch(grid=(grid_x, grid_y, grid_z), block=self.block, smem=self.smem_bytes)
