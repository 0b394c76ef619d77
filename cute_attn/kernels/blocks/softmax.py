"""Online softmax over row slots (Milakov & Gimelshein 2018, as FlashAttention-2 uses it).

Scores stay in their own unit; `log2_scale` turns them into base-2 exponents inside one FMA: p = exp2(s * c - max * c).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.mma import WarpTile


@dataclass(frozen=True)
class OnlineSoftmax:
    tile: WarpTile
    log2_scale: Float32

    def columns(self, slot: int) -> list[int]:
        """Indices of a row slot's scores in the flat accumulator."""
        m, half = divmod(slot, 2)
        start = 4 * m * self.tile.n_blocks + 2 * half
        return [start + 4 * n + j for n in range(self.tile.n_blocks) for j in (0, 1)]

    def maxima(self, s: list[Float32], row_max: list[Float32]) -> list[Float32]:
        """Running maximum of each row slot."""
        highs = []
        for slot in range(self.tile.row_slots):
            high = reduce_quad(ptx.fmax, tree(ptx.fmax, [s[i] for i in self.columns(slot)]))
            highs.append(ptx.fmax(row_max[slot], high))
        return highs

    def shifts(self, row_max: list[Float32], may_be_empty: bool) -> list[Float32]:
        """-max * c per row slot. `may_be_empty`: a row may have seen no key yet; its -inf must not meet another."""
        if may_be_empty:
            row_max = [ptx.select(x == ptx.NEG_INF, Float32(0.0), x) for x in row_max]
        return [Float32(0.0) - x * self.log2_scale for x in row_max]

    def factors(self, old_max: list[Float32], shifts: list[Float32]) -> list[Float32]:
        """What earlier sums and outputs are multiplied by: exp2((old max - new max) * c)."""
        return [ptx.exp2(ptx.fma(x, self.log2_scale, shift)) for x, shift in zip(old_max, shifts, strict=True)]

    def exponentials(self, s: list[Float32], shifts: list[Float32]) -> list[Float32]:
        p = list(s)
        for slot, shift in enumerate(shifts):
            for i in self.columns(slot):
                p[i] = ptx.exp2(ptx.fma(s[i], self.log2_scale, shift))
        return p

    def sums(self, p: list[Float32], row_sum: list[Float32], factors: list[Float32]) -> list[Float32]:
        """Running sums, per thread: the quad's are added up once, at the end."""
        totals = [tree(lambda a, b: a + b, [p[i] for i in self.columns(slot)]) for slot in range(len(row_sum))]
        return [ptx.fma(old, f, new) for old, f, new in zip(row_sum, factors, totals, strict=True)]

    @cute.jit
    def rescale(self, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        """Each row of an output accumulator times its slot's factor; once maxima have settled there is nothing to do."""
        changed = factors[0] != Float32(1.0)
        for factor in factors[1:]:
            changed = cutlass.or_(changed, factor != Float32(1.0))
        if cute.arch.vote_any_sync(changed):
            out = self.multiplied(out, factors)
        return out

    def multiplied(self, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        per_m = len(out) // self.tile.m_blocks
        return [x * factors[i // per_m * 2 + i % 4 // 2] for i, x in enumerate(out)]


def tree(op, values):  # type: ignore[no-untyped-def]  # over traced values
    """Balanced reduction: depth log2 n instead of a chain of n dependent operations."""
    while len(values) > 1:
        paired = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[len(paired) * 2 :]
    return values[0]


def reduce_quad(op, x):  # type: ignore[no-untyped-def]
    """Over the four lanes that share a row of an MMA accumulator."""
    for lane_mask in (1, 2):
        x = op(x, ptx.shuffle_xor(x, lane_mask))
    return x
