"""Swizzled addresses of tiles in shared memory.

Rows are whole 128-byte lines, in which 16-byte chunk c of row r is stored at position c xor (r mod 8). The eight row
addresses of one ldmatrix matrix then fall into different banks, and a row's lines are written whole (rows padded by 16
bytes instead cost every cp.async more than a second wavefront: 2.3 times the writes, measured on an H200). Shorter rows
share a line, and are swizzled by the number of the line.
"""

from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.formats import LINE

CHUNK = 16


def swizzled(row: Int32, chunk: Int32, pitch: int) -> Int32:
    """Returns the offset of a 16-byte chunk in a tile whose base is a multiple of 128 bytes."""
    rows, chunks = max(1, LINE // pitch), min(pitch, LINE) // CHUNK  # of a line
    return row * pitch + ((chunk ^ (row >> (rows.bit_length() - 1) & (chunks - 1))) * CHUNK)


def swizzled_offset(address: Int32, chunks: int) -> tuple[Int32, int]:
    """Returns (register, immediate) of the chunk `chunks` to the right of `address`, which is that of a row's chunk 0,
    or of chunk 1 if `chunks` is even.
    """
    within = chunks % 8 * CHUNK
    return (address ^ Int32(within) if within else address), chunks // 8 * LINE


def present(chunk: Int32, left: int, lanes: int, size: Int32) -> Int32:
    """Returns `size` if chunk `chunk` of the next `lanes` of a row is one of the `left` that the row has, else 0."""
    return size if left >= lanes else ptx.select(chunk < left, size, Int32(0))
