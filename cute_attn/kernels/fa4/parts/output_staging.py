"""Output of a query tile through shared memory: registers to a staging buffer, which TMA stores as boxes."""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.fa4.parts.lanes import RowLanes
from cute_attn.kernels.fa4.spec import QUERY_TILE_ROWS
from cute_attn.kernels.formats import LINE

BARRIER = 1  # named, of the epilogue warpgroup
COLUMN_BYTES = QUERY_TILE_ROWS * LINE


@dataclass(frozen=True)
class OutputStaging:
    """Staging buffer of one query tile of 16-bit outputs, in columns of 128-byte lines as TMA reads them. One thread of
    the warpgroup, always the same, starts the stores and waits for them.
    """

    dtype: str
    columns: int  # of lines
    buffer: Int32
    lanes: RowLanes

    @property
    def storing(self) -> Boolean:
        """Whether this thread is the one that stores."""
        return self.lanes.lane_row == 0

    @cute.jit
    def acquire(self) -> None:
        """Waits until the tile before has been read from the buffer."""
        self.drain()
        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)

    def write_columns(self, first: int, values: Sequence[Float32]) -> None:
        """Writes columns from `first`, multiples of eight, of the thread's row."""
        row = self.buffer + swizzled(self.lanes.lane_row, Int32(0), LINE)
        for i in range(0, len(values), 8):
            chunk, words = (first + i) // 8, ptx.pack_pairs(self.dtype, values[i : i + 8])
            ptx.st_shared_v4(row ^ Int32(chunk % 8 * CHUNK), chunk // 8 * COLUMN_BYTES, words)

    @cute.jit
    def store(self, tensor_map: Int64, place: list[Int32]) -> None:
        """Starts storing the buffer to the rows from `place` (head, token, block of heads), after all writes."""
        tma.fence_async()
        tma.named_sync(Int32(BARRIER), QUERY_TILE_ROWS)
        if self.storing:
            for column in cutlass.range_constexpr(self.columns):
                tma.store_4d(
                    tensor_map, [Int32(column * (LINE // 2)), *place], self.buffer + Int32(column * COLUMN_BYTES)
                )
            tma.store_commit()

    @cute.jit
    def drain(self) -> None:
        """Waits until all stores have read the buffer."""
        if self.storing:
            tma.store_wait_read()
