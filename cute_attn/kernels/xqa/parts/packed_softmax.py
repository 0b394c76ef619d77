"""The softmax with two scores an instruction (sm_100 and later): the two columns of a lane lie side by side."""

from dataclasses import dataclass

from cutlass import Float32, Int64

from cute_attn.kernels.blocks import ptx, sm100
from cute_attn.kernels.blocks.softmax import INFINITY, tree
from cute_attn.kernels.xqa.parts.softmax import ColumnSoftmax


@dataclass(frozen=True)
class PackedColumnSoftmax(ColumnSoftmax):
    def largest(self, values: list[Float32]) -> Float32:
        """Maximum, three numbers at a time."""
        while len(values) > 1:
            threes = [values[i : i + 3] for i in range(0, len(values), 3)]
            values = [sm100.fmax3(*x) if len(x) == 3 else x[0] if len(x) == 1 else ptx.fmax(*x) for x in threes]
        return values[0]

    def exponentials(self, s: list[Float32], shift: list[Float32]) -> list[Float32]:
        finite = [ptx.select(x == Float32(INFINITY), Float32(0.0), x) for x in shift]
        scales, shifts = self._pairs(self.log2_scale), self._pairs(finite)
        blocks = [self.slot(i) // 2 for i in range(0, len(s), 2)]
        scaled = [sm100.fma_pair(x, scales[b], shifts[b]) for x, b in zip(self._pairs(s), blocks, strict=True)]
        return [ptx.exp2(x) for two in scaled for x in sm100.halves(two)]

    def sums(self, p: list[Float32], total: list[Float32]) -> list[Float32]:
        """Sums of both columns at once."""
        pairs, found = self._pairs(p), self._pairs(total)
        for block in range(self.row_blocks):
            mine = [x for i, x in enumerate(pairs) if self.slot(2 * i) // 2 == block]
            found[block] = sm100.add_pair(tree(sm100.add_pair, mine), found[block])
        return [x for two in found for x in sm100.halves(two)]

    def _pairs(self, values: list[Float32]) -> list[Int64]:
        return [sm100.pair(*values[i : i + 2]) for i in range(0, len(values), 2)]
