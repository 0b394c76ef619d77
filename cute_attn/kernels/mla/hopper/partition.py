"""Partition of requests that are equally long: equal shares would cut each of them somewhere else."""

from cutlass import Int32

from cute_attn.kernels.xqa.parts.even import EvenPartition

SWITCH = 4  # tiles in whose time a CTA ends a part of a segment and begins another


class LatentPartition(EvenPartition):
    """Partition of CTAs that are bound by computing: the one with the largest share ends last."""

    def spare(self, size: Int32) -> Int32:
        return Int32(SWITCH)
