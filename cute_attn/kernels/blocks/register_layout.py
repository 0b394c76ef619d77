"""Register layouts: how a tile's accumulator lies in the registers of one thread, and where that part is in the tile.

A row slot is a row of which a thread holds a part. Columns are relative to the first of the thread, rows to that of its
slot 0, so that both are constants of the trace; the thread's position in the CTA's tile is a run-time value.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx


class RegisterLayout(ABC):
    """One thread's part of a tile."""

    @property
    @abstractmethod
    def slots(self) -> range:
        """Row slots of the thread."""

    @abstractmethod
    def places(self, slot: int) -> list[tuple[int, int]]:
        """Returns (register, column) of all that the thread holds of a row slot, in ascending order."""

    @abstractmethod
    def slot_of(self, register: int) -> int:
        """Returns the row slot of a register."""

    @abstractmethod
    def reduce(self, op: Callable[[Float32, Float32], Float32], x: Float32) -> Float32:
        """Reduces over the threads that share a row."""

    @property
    def columns_per_thread(self) -> int:
        """Number of registers of a row slot."""
        return len(self.places(0))

    def zeros(self) -> list[Float32]:
        """Returns an accumulator of zeros."""
        return [Float32(0.0) for _ in range(len(self.slots) * self.columns_per_thread)]

    def of_slot(self, values: Sequence[Float32], slot: int) -> list[Float32]:
        """Returns the values of one row slot."""
        return [values[register] for register, _ in self.places(slot)]

    def scale_rows(self, values: Sequence[Float32], factors: Sequence[Float32]) -> list[Float32]:
        """Multiplies every value by the factor of its row slot."""
        return [x * factors[self.slot_of(register)] for register, x in enumerate(values)]


@dataclass(frozen=True)
class MmaFragmentLayout(RegisterLayout):
    """Accumulator of mma.sync (one warp) or wgmma (`m_blocks` 1): blocks of 16 rows by 8 columns, block (m, n) from
    register 4 (m n_blocks + n).

    Registers 0 and 1 of a block are row lane // 4, columns 2 (lane % 4) + {0, 1}; registers 2 and 3 the row 8 below. So
    slots 2 m and 2 m + 1 are the upper and lower row of block row m, and the four lanes of a quad share their rows.
    """

    m_blocks: int
    n_blocks: int

    @property
    def slots(self) -> range:
        return range(2 * self.m_blocks)

    def block(self, m: int, n: int) -> int:
        """Returns the first register of a block."""
        return 4 * (m * self.n_blocks + n)

    @staticmethod
    def column(n: int) -> int:
        """Returns the thread's first column of block n."""
        return 8 * n

    def pairs(self, slot: int) -> list[tuple[int, int]]:
        """Returns (register, column) of the first of every two registers with adjacent columns."""
        m, lower = divmod(slot, 2)
        return [(self.block(m, n) + 2 * lower, self.column(n)) for n in range(self.n_blocks)]

    def places(self, slot: int) -> list[tuple[int, int]]:
        return [(register + j, column + j) for register, column in self.pairs(slot) for j in (0, 1)]

    def slot_of(self, register: int) -> int:
        return register // (4 * self.n_blocks) * 2 + register % 4 // 2

    def reduce(self, op: Callable[[Float32, Float32], Float32], x: Float32) -> Float32:
        return ptx.reduce_lanes(op, x, (1, 2))

    @staticmethod
    def row(slot: int) -> int:
        """Returns the row of a slot relative to that of slot 0."""
        return slot // 2 * 16 + slot % 2 * 8

    @staticmethod
    def lane_row(lane: Int32) -> Int32:
        """Returns the row of slot 0 within the warp's."""
        return lane // 4

    @staticmethod
    def quad_lane(lane: Int32) -> Int32:
        """Returns the index of a lane among the four that share its rows."""
        return lane % 4

    @classmethod
    def lane_col(cls, lane: Int32) -> Int32:
        """Returns a lane's first column within the warp's."""
        return cls.quad_lane(lane) * 2


class FragmentPosition:
    """Position in the CTA's tile of a thread whose part lies as `MmaFragmentLayout` says, in the rows from `first_row`,
    which are those of its warp.
    """

    lane: Int32

    @property
    def first_row(self) -> Int32:
        raise NotImplementedError

    @property
    def quad_lane(self) -> Int32:
        return MmaFragmentLayout.quad_lane(self.lane)

    def row(self, slot: int) -> Int32:
        """Returns the tile row of a row slot."""
        return self.first_row + MmaFragmentLayout.lane_row(self.lane) + MmaFragmentLayout.row(slot)

    def first_col(self) -> Int32:
        """Returns the tile column of the thread's first register."""
        return self.first_warp_col() + self.lane_col()

    def first_warp_col(self) -> Int32:
        """Returns that of the warp's first register. By default every warp sees all columns."""
        return Int32(0)

    def lane_col(self) -> Int32:
        """Returns the thread's first column relative to the warp's."""
        return MmaFragmentLayout.lane_col(self.lane)


@dataclass(frozen=True)
class RowNumbers:
    """Columns of fp32 numbers in shared memory, with one per row of the tile: what warps that share rows tell each
    other.
    """

    address: Int32
    tile_rows: int
    lanes: FragmentPosition

    @cute.jit
    def put(self, column: Int32, values: list[Float32]) -> None:
        """Writes a number per row slot, the same in all lanes of a quad."""
        if self.lanes.quad_lane == 0:
            column = self.address + column * (self.tile_rows * 4)
            for slot in cutlass.range_constexpr(len(values)):
                ptx.st_shared_f32(column + self.lanes.row(slot) * 4, 0, values[slot])

    def of_row(self, row: Int32, columns: int) -> list[Float32]:
        """Reads the numbers of a row in the first columns."""
        return [ptx.ld_shared_f32(self.address + row * 4, i * self.tile_rows * 4) for i in range(columns)]

    def of_column(self, column: Int32, slots: Sequence[int]) -> list[Float32]:
        """Reads the numbers of this thread's row slots."""
        address = self.address + column * (self.tile_rows * 4)
        return [ptx.ld_shared_f32(address + self.lanes.row(slot) * 4) for slot in slots]


@dataclass(frozen=True)
class RowLayout(RegisterLayout):
    """Part of a thread that owns a whole row, as tcgen05.ld.32x32b gives it: register i is column i."""

    columns: int

    @property
    def slots(self) -> range:
        return range(1)

    def places(self, slot: int) -> list[tuple[int, int]]:
        return [(i, i) for i in range(self.columns)]

    def slot_of(self, register: int) -> int:
        return 0

    def reduce(self, op: Callable[[Float32, Float32], Float32], x: Float32) -> Float32:
        return x
