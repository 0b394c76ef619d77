"""Online softmax over row slots (Milakov & Gimelshein 2018, as FlashAttention-2 uses it).

Scores stay in their own unit; `log2_scale` turns them into base-2 exponents inside one FMA: p = exp2(s * c - max * c).
"""

from dataclasses import dataclass

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

    def update(
        self, s: list[Float32], row_max: list[Float32], row_sum: list[Float32], may_be_empty: bool
    ) -> tuple[list[Float32], list[Float32], list[Float32], list[Float32]]:
        """(p, new max, new sum, factor for what was accumulated). Sums stay per thread until `reduce_quad`.

        `may_be_empty`: some row may have no visible key so far; its maximum is -inf and must not meet another infinity.
        """
        p = list(s)
        new_max, new_sum, factors = [], [], []
        for slot in range(self.tile.row_slots):
            columns = self.columns(slot)
            high = reduce_quad(ptx.fmax, tree(ptx.fmax, [s[i] for i in columns]))
            high = ptx.fmax(row_max[slot], high)
            anchor = high
            if may_be_empty:
                anchor = ptx.select(high == ptx.NEG_INF, Float32(0.0), high)
            shift = Float32(0.0) - anchor * self.log2_scale
            for i in columns:
                p[i] = ptx.exp2(ptx.fma(s[i], self.log2_scale, shift))
            factor = ptx.exp2(ptx.fma(row_max[slot], self.log2_scale, shift))
            total = tree(lambda a, b: a + b, [p[i] for i in columns])
            new_max.append(high)
            new_sum.append(ptx.fma(row_sum[slot], factor, total))
            factors.append(factor)
        return p, new_max, new_sum, factors

    def rescale(self, out: list[Float32], factors: list[Float32]) -> list[Float32]:
        """Each row of an output accumulator times its slot's factor."""
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
