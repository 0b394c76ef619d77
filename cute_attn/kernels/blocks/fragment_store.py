"""What stores of MMA accumulators share: the four lanes of a quad hold parts of the same rows."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, Partials, RowStats, Target, words_of
from cute_attn.kernels.blocks.register_layout import MmaFragmentLayout
from cute_attn.kernels.blocks.rows import PackedRows


@dataclass(frozen=True)
class FragmentStore:
    """Base of the stores of a warp's or warpgroup's outputs and their lse."""

    layout: MmaFragmentLayout
    lanes: Any  # `FragmentPosition`
    rows: PackedRows
    target: Target | Partials
    epilogue: FinalEpilogue | PartialEpilogue

    @property
    def first_col(self) -> Int32:
        """Column of the thread's first register."""
        return self.layout.lane_col(self.lanes.lane)

    @cute.jit
    def store_lse(self, row: Int32, lse: Float32) -> None:
        if cutlass.and_(self.lanes.quad_lane == 0, self.rows.exists(row)):
            self.target.store_lse(self.rows, row, lse)

    @cute.jit
    def store_pairs(self, row: Int32, pairs: cutlass.Constexpr) -> None:
        """Stores a row slot as fp32, from an iterable of register pairs, one per block of the layout."""
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.first_col * 4)
            for n, pair in enumerate(pairs):
                ptx.st_global_v2_f32(address, self.layout.column(n) * 4, pair)


@dataclass(frozen=True)
class WarpgroupStore(FragmentStore):
    """Store of an MMA warpgroup: normalises, exchanges within quads, stores. No shared memory, no barrier."""

    def write(self, out: list[Float32], shift: list[Float32], total: list[Float32]) -> None:
        """Normalises and stores; `shift` and `total` as softmax leaves them: per row slot, sums still per thread."""
        for slot in self.layout.slots:
            row, stats = self.lanes.row(slot), RowStats.of(self.layout, [shift[slot]], [total[slot]])
            factor, lse = self.epilogue.row(stats.maximum[0], stats.total[0], self.rows.head(row))
            values = [x * factor for x in self.layout.of_slot(out, slot)]
            if self.target.dtype == "float32":
                self.store_f32(row, values)
            else:
                self.store_chunks(row, values)
            self.store_lse(row, lse)

    def store_f32(self, row: Int32, values: list[Float32]) -> None:
        self.store_pairs(row, [values[i : i + 2] for i in range(0, len(values), 2)])

    @cute.jit
    def store_chunks(self, row: Int32, values: list[Float32]) -> None:
        """Stores 16-bit rows: of every 32 columns, a lane stores eight, those of index `quad_lane`, as 16 bytes. Of
        fewer at the end, the first lanes do. 8-bit rows: of every 64, sixteen.
        """
        packed = self.packed(values)
        whole, rest = divmod(len(packed), 4)
        packed += [Int32(0)] * (-len(packed) % 4)
        chunks = [self.in_order(self.transposed(packed[i : i + 4])) for i in range(0, len(packed), 4)]
        if self.rows.exists(row):
            address = self.target.row(self.rows, row) + Int64(self.lanes.quad_lane * 16)
            for i in cutlass.range_constexpr(whole):
                ptx.st_global_v4(address, i * 64, chunks[i])
            if cutlass.const_expr(rest > 0):  # noqa: SIM102
                if self.lanes.quad_lane < rest:
                    ptx.st_global_v4(address, whole * 64, chunks[whole])

    def packed(self, values: list[Float32]) -> list[Int32]:
        """Packs a row slot into words."""
        return words_of(self.target.dtype, values)

    def in_order(self, words: list[Int32]) -> list[Int32]:
        """Orders four transposed words by column."""
        return words

    def transposed(self, mine: list[Int32]) -> list[Int32]:
        """Transposes within each quad: register j of lane l becomes register l of lane j."""
        mine = list(mine)
        for bit in (1, 2):
            upper = (self.lanes.lane & bit) != 0
            for low in range(4):
                if not low & bit:
                    high = low | bit
                    got = ptx.shuffle_xor(ptx.select(upper, mine[low], mine[high]), bit)
                    mine[low], mine[high] = ptx.select(upper, got, mine[low]), ptx.select(upper, mine[high], got)
        return mine


@dataclass(frozen=True)
class NarrowStore(WarpgroupStore):
    """Store of a warpgroup's outputs in fp8: a word has two columns of a block of eight and two of the next."""

    def in_order(self, words: list[Int32]) -> list[Int32]:
        """Orders the bytes of four transposed words, each of two blocks of eight columns, by column."""
        a, b, c, d = words
        return [ptx.permute(x, y, selector) for selector in (0x5410, 0x7632) for x, y in ((a, b), (c, d))]
