"""Online softmax whose P is e4m3."""

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.softmax import OnlineSoftmax

P_DTYPE = "float8_e4m3fn"
P_MAX = 448.0  # of e4m3, which has full precision from 2^-6
PEAK_LOG2 = 7.1  # to which rows dominated by one key are raised; leaves room for a peak up to three times as high
MAX_RAISE = 4.0  # log2, at a time


@dataclass(frozen=True)
class E4m3Softmax(OnlineSoftmax):
    """Online softmax with P in the range of e4m3: the largest P right after a rescale is 2^`p_log2`."""

    p_log2: ClassVar[float]

    def anchor(self, high: Float32, slot: int) -> Float32:
        return self.exponent(Float32(0.0) - high, Float32(self.p_log2), slot)

    def raised_by(self, room: Float32) -> Float32:
        """Returns the exponent by which the P of a row grow, if there is `room` (log2) for it."""
        return ptx.fmin(ptx.fmax(ptx.floor(room), Float32(0.0)), Float32(MAX_RAISE))
