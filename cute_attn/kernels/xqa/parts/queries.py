"""Query rows as the B operands of S^T = K Q^T, in registers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.scores import MIN_SCALE
from cute_attn.kernels.xqa.parts.formats import Format
from cute_attn.kernels.xqa.parts.partition import Partition, Segment
from cute_attn.kernels.xqa.parts.team import LoneWarp, WarpTeam
from cute_attn.kernels.xqa.smem import XqaMemory
from cute_attn.kernels.xqa.spec import XqaSpec

SIGNS = -0x7FFF8000  # sign bits of two 16-bit numbers
TOP_EXPONENT = 14  # exponent of the largest element of a row after scaling into fp16


class Queries(NamedTuple):
    """fragments[block][step]: the B registers (b0, b1). `log2_scale`: per column, the factor from scores to base-2
    exponents."""

    fragments: list[list[list[Int32]]]
    log2_scale: list[Float32]


@dataclass(frozen=True)
class QueryRows:
    spec: XqaSpec
    memory: XqaMemory
    team: LoneWarp | WarpTeam
    format: Format
    p: Any  # XqaParams

    def load(self, segment: Segment) -> list[Int32]:
        """Issue the loads of a segment's rows. This must precede the copies of its first tiles: every warp needs Q
        first, and behind those copies in the memory queue it would arrive last.
        """
        rows, p = Partition(self.p, self.spec).rows(segment), self.p
        lane = cute.arch.thread_idx()[0] & 31
        words = []
        for block in range(self.spec.row_blocks):
            row = self.spec.row(lane >> 2) + 8 * block
            address = self.team.shifted(rows.address(p.q, row, p.q_stride_n, p.q_stride_h), 2 * self.spec.warp_dim)
            words += self._words(address, rows.exists(row), lane & 3)
        return words

    def no_words(self) -> list[Int32]:
        words = self.memory.loads * 32 // self.spec.kv_bits  # two per step of 16 columns
        return [Int32(0) for _ in range(self.spec.row_blocks * words)]

    def operands(self, words: list[Int32], score_scale: Float32) -> Queries:
        """B operands from loaded words; `score_scale`: from scores to base-2 exponents. A negative one flips the signs
        of Q, because the softmax assumes a positive one."""
        t = cute.arch.thread_idx()[0] & 3
        signs = ptx.select(score_scale < Float32(0.0), Int32(SIGNS), Int32(0))
        fragments, scales = [], []
        per_block = len(words) // self.spec.row_blocks
        for start in range(0, len(words), per_block):
            block = words[start : start + per_block]
            scale = ptx.magnitude(score_scale)
            if self.spec.mma_dtype != self.spec.dtype:
                block, factor = self._to_fp16(block)
                scale = scale * factor
            scale = ptx.fmax(scale, Float32(MIN_SCALE))
            block = [word ^ signs for word in block]
            fragments.append([block[i : i + 2] for i in range(0, len(block), 2)])
            # Accumulators have rows 2t and 2t + 1 as columns; the scale of row g is with lanes 4g.
            scales += [ptx.shuffle_from(scale, t * 8 + 4 * column) for column in (0, 1)]
        return Queries(fragments, scales)

    def _words(self, address: Int64, exists: Any, t: Int32) -> list[Int32]:
        """Load b0, b1 of every step of 16 contraction indices, in the order of K's format (see `formats`)."""
        words: list[Int32] = []
        for start in range(0, self.memory.loads * 512 // self.spec.kv_bits, self.format.q_bytes):

            def load(lane: Int32, offset: int, count: int, start: int = start) -> list[Int32]:
                return self._load(exists, address + Int64(lane), start + offset, count)

            words += self.format.q_words(load, t)
        return words

    def _load(self, exists: Any, address: Int64, start: int, words: int) -> list[Int32]:
        """Load words from byte `start` of a row on; beyond the last column there are zeros."""
        if start < 2 * self.spec.warp_dim:
            return ptx.load_if(exists, address, start, words)
        return [Int32(0) for _ in range(words)]

    def _to_fp16(self, words: list[Int32]) -> tuple[list[Int32], Float32]:
        """Convert bf16 pairs to fp16 after scaling the row by a power of two; what that loses is negligible next to the
        row's largest element. Returns the words and the inverse factor."""
        values = ptx.unpack_pairs(self.spec.dtype, words)
        largest = ptx.magnitude(values[0])
        for value in values[1:]:
            largest = ptx.fmax(largest, ptx.magnitude(value))
        largest = ptx.reduce_lanes(ptx.fmax, largest, (1, 2))
        exponent = ptx.bits(largest) >> 23
        field = ptx.minimum(TOP_EXPONENT + 254 - exponent, Int32(253))
        factor, inverse = ptx.from_bits(field << 23), ptx.from_bits((254 - field) << 23)
        return ptx.pack_pairs("float16", [value * factor for value in values]), inverse
