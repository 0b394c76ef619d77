"""Conversion of stored K and V to the 16-bit operands of the matrix instructions.

The ring holds fp8 and NVFP4 rows as stored; each tile is converted once, into a 16-bit tile outside the ring that all
warps of a team share. Every fp8 and NVFP4 number is exact in both 16-bit types: e2m1 has 2 significant bits, an
e4m3 block scale 4, their product 6.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import E2m1, Fp8
from cute_attn.kernels.blocks.smem import CHUNK, swizzled
from cute_attn.kernels.fa2.parts.kv import Team
from cute_attn.kernels.fa2.smem import SCALES_PITCH, SharedMemory


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
        scales = slot + Int32(memory.scales_offset) + row0 * SCALES_PITCH
        parts = (
            Part(slot, memory.k_pitch, self.target, memory.qk_pitch, k_chunks, scales),
            Part(
                slot + Int32(memory.v_offset),
                memory.v_pitch,
                self.target + Int32(memory.operand_v),
                memory.vo_pitch,
                v_chunks,
                scales + Int32(SCALES_PITCH // 2),
            ),
        )
        steps = [
            (part.at_row(row0), i * team.size) for part in parts for i in range(-(-rows * part.chunks // team.size))
        ]
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
        return Part(source, self.source_pitch, target, self.target_pitch, self.chunks, self.scales)


@dataclass(frozen=True)
class Nvfp4:
    """Converts e2m1 numbers, low nibble first, with one e4m3 scale per 16 numbers."""

    dtype: str
    e2m1: E2m1
    e4m3: Fp8

    def pairs(self, words: list[Int32], scales: Int32) -> list[Int32]:
        """Converts 32 numbers to 16 words."""
        both = self.e4m3.word(ptx.ld_shared_u16(scales))[0]
        result = []
        for i, word in enumerate(words):
            scale = ptx.permute(both, both, 0x1010 if i < 2 else 0x3232)
            result += [ptx.multiply_16(self.dtype, pair, scale) for pair in self.e2m1.word(word)]
        return result
