"""K and V rows on their way: cp.async copies into shared memory, and conversion."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import Fp8
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.smem import CHUNK, present, swizzled
from cute_attn.kernels.fa2.smem import SCALES_PITCH, SharedMemory
from cute_attn.kernels.formats import LINE


@dataclass(frozen=True)
class Team:
    """Threads that load and consume the same rows: the CTA, or one warp when every warp owns kv columns alone."""

    size: int
    thread: Int32  # index within the team
    index: Int32  # of the team

    @classmethod
    def of(cls, memory: SharedMemory) -> "Team":
        thread = cute.arch.thread_idx()[0]
        if memory.tile.one_team:
            return cls(memory.tile.threads, thread, Int32(0))
        return cls(32, thread % 32, cute.arch.make_warp_uniform(thread // 32))

    def sync(self) -> None:
        if self.size == 32:
            ptx.sync_warp()
        else:
            ptx.sync_threads()


@dataclass(frozen=True)
class TokenRows:
    """K or V of one kv head: token t at base + t * stride; in a tile, rows are `pitch` apart.

    Eight adjacent threads copy a 128-byte line of a row, each a chunk of 16 bytes: at once, or where rows start and end
    at multiples of 8 bytes, half by half. Nonexistent tokens and what is past the head dim become zeros: a NaN there
    would survive 0 * V.
    """

    base: Int64
    stride: Int64
    page_stride: Int64  # where tokens are in pages
    row_bytes: int
    pitch: int
    copy_bytes: int  # 16 or 8

    def moved(self, tokens: Int32) -> "TokenRows":
        """The rows starting at token `tokens`."""
        return dataclasses.replace(self, base=self.base + Int64(tokens) * self.stride)

    def copies(self, team: Team, target: Int32, rows: int, start: Int32, left: Int32) -> Iterator[None]:
        """Yields after each cp.async of this thread: the team's `rows` tokens from `start`, of which `left` exist."""
        step = team.size // 8
        thread = ptx.opaque(team.thread)
        row, chunk = thread >> 3, thread & 7
        shared = target + swizzled(row, chunk, self.pitch)
        source = self.base + Int64(start + row) * self.stride + Int64(chunk * CHUNK)
        for i in range(rows // step):
            size = ptx.select(Int32(i * step) < left - row, Int32(CHUNK), Int32(0))
            yield from self.copy_row(shared, i * step, source, chunk, size)
            source = source + self.stride * Int64(step)

    def copy_row(self, shared: Int32, row: int, source: Int64, chunk: Int32, size: Int32) -> Iterator[None]:
        """Copies this thread's chunks of the row `row` rows below the one at `shared`."""
        # row0 + row has the low bits of row0 xor those of `row`: row0 < row, both powers of two.
        destination = shared ^ Int32(row % 8 * CHUNK) if row % 8 else shared
        wanted = size if self.copy_bytes == CHUNK else size >> 1
        for line in range(0, self.pitch, LINE):
            for start in range(line, line + CHUNK, self.copy_bytes):
                left = -(-(self.row_bytes - start) // CHUNK)  # chunks that have these bytes
                part = present(chunk, left, 8, wanted)
                ptx.cp_async(destination, row * self.pitch + start, source, start, part, self.copy_bytes)
            yield


class Scales(NamedTuple):
    """NVFP4 block scales of K or V: address of token 0, strides per token and per page, 4-byte words per row."""

    base: Int64
    stride: Int64
    page_stride: Int64
    words: Int32


@dataclass(frozen=True)
class ScaleRows:
    """Block scales of K and V, of which a thread copies a word per row."""

    k: Scales
    v: Scales

    def copy_row(self, target: Int32, row: int, page: Int32, token: Int32, size: Int32, chunk: Int32) -> Iterator[None]:
        """Copies the words of K with four of a row's eight threads and those of V with the others; nonexistent tokens
        get zeros. `target`: of this thread's row in the first pass.
        """
        is_k, word = chunk < 4, chunk & 3
        base, stride, page_stride, words = (ptx.select(is_k, *both) for both in zip(self.k, self.v, strict=True))
        address = ptx.mad_u32(token, stride, ptx.mad_u32(page, page_stride, base + Int64(word * 4)))
        part = ptx.select(word < words, size >> 2, Int32(0))
        ptx.cp_async(target + Int32(row * SCALES_PITCH) + chunk * 4, 0, address, 0, part, 4)
        yield


@dataclass(frozen=True)
class KVTiles:
    """K and V tiles of one request; a team loads the rows that it consumes."""

    memory: SharedMemory
    team: Team
    k: TokenRows
    v: TokenRows
    scales: ScaleRows | None
    kv_end: Int32

    @property
    def rows(self) -> int:
        """Rows of a tile that one team loads."""
        return self.memory.tile.team_cols

    @property
    def count(self) -> int:
        """Copies per thread and tile."""
        lines = (self.k.pitch + self.v.pitch) // LINE
        return self.passes * (lines + (self.scales is not None))

    @property
    def passes(self) -> int:
        """Passes of the team over a tile, with eight threads per row."""
        return self.rows * 8 // self.team.size

    def first_token(self, kv_tile: Int32) -> Int32:
        return kv_tile * self.memory.tile.cols + self.team.index * self.rows

    def k_target(self, slot: Int32) -> Int32:
        return slot + self.team.index * self.rows * self.k.pitch

    def v_target(self, slot: Int32) -> Int32:
        return slot + Int32(self.memory.v_offset) + self.team.index * self.rows * self.v.pitch

    def scales_target(self, slot: Int32, row: Int32) -> Int32:
        return slot + Int32(self.memory.scales_offset) + (self.team.index * self.rows + row) * SCALES_PITCH


@dataclass(frozen=True)
class DenseKV(KVTiles):
    """K and V with a constant token stride."""

    def prefetch_page_ids(self, kv_tile: Int32, wanted: Boolean) -> list[Int32]:
        """Returns nothing: dense tiles have no page ids."""
        return []

    def copies(self, kv_tile: Int32, slot: Int32, wanted: Boolean, page_ids: list[Int32]) -> Iterator[None]:
        """Copies a kv tile into the ring slot at shared address `slot`; a tile that is not `wanted` reads nothing."""
        start = self.first_token(kv_tile)
        left = ptx.select(wanted, self.kv_end - start, Int32(0))
        yield from self.k.copies(self.team, self.k_target(slot), self.rows, start, left)
        yield from self.v.copies(self.team, self.v_target(slot), self.rows, start, left)
        if self.scales:
            yield from self.scale_copies(self.scales, slot, start, left)

    def scale_copies(self, scales: ScaleRows, slot: Int32, start: Int32, left: Int32) -> Iterator[None]:
        step, thread = self.team.size // 8, ptx.opaque(self.team.thread)
        row, chunk = thread >> 3, thread & 7
        target = self.scales_target(slot, row)
        for i in range(self.passes):
            size = ptx.select(Int32(i * step) < left - row, Int32(CHUNK), Int32(0))
            yield from scales.copy_row(target, i * step, Int32(0), start + row + i * step, size, chunk)


ROWS_PER_PASS = 4  # of a warp, eight threads per row


@dataclass(frozen=True)
class PagedKV(KVTiles):
    """K and V in pages: token t of a request is row t mod page_size of page kv_indices[first page + t / page_size].

    Page ids of a tile, one row per lane, are loaded while the previous tile is computed, so that they are in registers
    when the copies are issued: the eight threads of a row shuffle its page id from the lane that holds it.

    `table`: address of kv_indices, where the request's pages start at index `first_page`.
    """

    table: Int64
    first_page: Int32
    page_size: Divisor

    def prefetch_page_ids(self, kv_tile: Int32, wanted: Boolean) -> list[Int32]:
        """Loads the page ids of a tile: lane 4 i + r holds that of row r of this warp's pass i. Nothing is read past
        the end.
        """
        assert self.passes * ROWS_PER_PASS <= 32
        thread = ptx.opaque(self.team.thread)
        lane = thread & 31
        row = (thread >> 5) * ROWS_PER_PASS + (lane & 3) + (lane >> 2) * (self.team.size // 8)
        token = self.first_token(kv_tile) + row
        exists = cutlass.and_(token < self.kv_end, cutlass.and_(wanted, lane < self.passes * ROWS_PER_PASS))
        page_index = self.first_page + self.page_size.quotient(token)
        return [ptx.ld_page_id_if(exists, self.table + Int64(page_index) * Int64(4))]

    def copies(self, kv_tile: Int32, slot: Int32, wanted: Boolean, page_ids: list[Int32]) -> Iterator[None]:
        """Copies as `DenseKV.copies`, with K and V of a row together."""
        step = self.team.size // 8
        thread = ptx.opaque(self.team.thread)
        row, chunk = thread >> 3, thread & 7
        first = self.first_token(kv_tile)
        end = ptx.select(wanted, self.kv_end - first, Int32(0))
        k_at = self.k_target(slot) + swizzled(row, chunk, self.k.pitch)
        v_at = self.v_target(slot) + swizzled(row, chunk, self.v.pitch)
        scales_at = self.scales_target(slot, row)
        for i in range(self.passes):
            page = ptx.shuffle_from(page_ids[0], Int32(ROWS_PER_PASS * i) + (row & 3))
            token = first + row + i * step
            within = token - self.page_size.quotient(token) * self.page_size.value
            size = ptx.select(Int32(i * step) < end - row, Int32(CHUNK), Int32(0))
            for source, target in ((self.k, k_at), (self.v, v_at)):
                address = source.base + Int64(chunk * CHUNK)
                address = ptx.mad_u32(within, source.stride, ptx.mad_u32(page, source.page_stride, address))
                yield from source.copy_row(target, i * step, address, chunk, size)
            if self.scales:
                yield from self.scales.copy_row(scales_at, i * step, page, within, size, chunk)


# --- conversion -------------------------------------------------------------------------------------------------------

# Stored K and V become the 16-bit operands of the matrix instructions. The ring holds fp8 and NVFP4 rows as stored;
# each tile is converted once, into a 16-bit tile outside the ring that all warps of a team share. Every fp8 and NVFP4
# number is exact in both 16-bit types: e2m1 has 2 significant bits, an e4m3 block scale 4, their product 6.


@dataclass(frozen=True)
class Operand:
    """16-bit K at `address` and V `memory.operand_v` bytes after it; `count` of the next tile's `copies` are still to
    issue.
    """

    address: Int32
    copies: Iterator[None]
    count: int


@dataclass(frozen=True)
class Stored:
    """16-bit K and V, used in place."""

    def operand(self, team: Team, slot: Int32, copies: Iterator[None], count: int) -> Operand:
        return Operand(slot, copies, count)


@dataclass(frozen=True)
class Converted:
    """K and V converted by `kind`, one 16-byte chunk at a time, into the 16-bit tile at `target`."""

    memory: SharedMemory
    kind: "Fp8 | Nvfp4"
    target: Int32

    def operand(self, team: Team, slot: Int32, copies: Iterator[None], count: int) -> Operand:
        """Converts the team's rows. The copies are issued in between: there are more free issue slots here than between
        matrix products.
        """
        memory = self.memory
        rows = memory.tile.team_cols
        row0 = team.index * rows
        k_chunks, v_chunks = -(-memory.k_bytes // CHUNK), -(-memory.v_bytes // CHUNK)  # the last may be half zeros
        k, v = slot, slot + Int32(memory.v_offset)
        to_k, to_v = self.target, self.target + Int32(memory.operand_v)
        scales = slot + Int32(memory.scales_offset) + row0 * SCALES_PITCH
        k_part = Part(k, memory.k_pitch, to_k, memory.qk_pitch, k_chunks, scales)
        v_part = Part(v, memory.v_pitch, to_v, memory.vo_pitch, v_chunks, scales + Int32(SCALES_PITCH // 2))
        parts = (part.at_row(row0) for part in (k_part, v_part))
        steps = [(part, i * team.size) for part in parts for i in range(-(-rows * part.chunks // team.size))]
        for n, (part, start) in enumerate(steps):
            index = team.thread + start
            if start + team.size <= rows * part.chunks:
                self.convert(part, index)
            else:
                self.convert_if(index < rows * part.chunks, part, index)
            for _ in range(count * n // len(steps), count * (n + 1) // len(steps)):
                next(copies)
        team.sync()
        return Operand(self.target, copies, 0)

    @cute.jit
    def convert_if(self, wanted: cutlass.Boolean, part: cutlass.Constexpr, index: Int32) -> None:
        if wanted:
            self.convert(part, index)

    def convert(self, part: "Part", index: Int32) -> None:
        row = index // part.chunks
        chunk = index - row * part.chunks
        words = ptx.ld_shared_v4(part.source + swizzled(row, chunk, part.source_pitch))
        pairs = self.kind.pairs(words, part.scales + row * SCALES_PITCH + chunk * 2)
        outputs = len(pairs) // 4  # chunks of the 16-bit row
        for i in range(outputs):
            destination = part.target + swizzled(row, chunk * outputs + i, part.target_pitch)
            ptx.st_shared_v4(destination, 0, pairs[4 * i : 4 * i + 4])


@dataclass(frozen=True)
class Part:
    """Source and target of one tile's rows of K or V; a stored row has `chunks` chunks of 16 bytes."""

    source: Int32
    source_pitch: int
    target: Int32
    target_pitch: int
    chunks: int
    scales: Int32

    def at_row(self, row: Int32) -> "Part":
        """The part from row `row`, a multiple of 8; `scales` already points there."""
        source, target = self.source + row * self.source_pitch, self.target + row * self.target_pitch
        return dataclasses.replace(self, source=source, target=target)


@dataclass(frozen=True)
class Nvfp4:
    """Converts e2m1 numbers, low nibble first, with one e4m3 scale per 16 numbers."""

    dtype: str
    e2m1: Callable[[Int32], list[Int32]]  # of a word
    e4m3: Fp8

    def pairs(self, words: list[Int32], scales: Int32) -> list[Int32]:
        """Converts 32 numbers to 16 words."""
        both = self.e4m3.word(ptx.ld_shared_u16(scales))[0]
        result = []
        for i, word in enumerate(words):
            scale = ptx.permute(both, both, 0x1010 if i < 2 else 0x3232)
            result += [ptx.multiply_16(self.dtype, pair, scale) for pair in self.e2m1(word)]
        return result
