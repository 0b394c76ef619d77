"""GPUs that the model of decode kernels sets clocks against: one table of data, with sources.

Bandwidth and multiprocessors are those of NVIDIA's data sheets. Clocks are what kernels ran at, or boost clocks; at
higher ones memory delivers fewer bytes a clock, so that every other unit has more room.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU. `mma_flops`: dense FLOP of `mma.sync` per SM and clock, 16-bit operands, sums in fp32."""

    name: str
    arch: str
    sms: int
    clock_ghz: float
    bandwidth: float  # GB/s of its memory
    mma_flops: int
    source: str

    def memory_clocks(self, num_bytes: float) -> float:
        """Returns the clocks that memory needs for `num_bytes` of each SM, all of which read."""
        return num_bytes / self.bytes_per_clock

    @property
    def bytes_per_clock(self) -> float:
        """Bytes that memory delivers to each SM in a clock."""
        return self.bandwidth / self.sms / self.clock_ghz


_HOPPER = "mma.sync about 63 % of wgmma's 4096 FLOP (published microbenchmarks); at least 1530 (FlashInfer fa2, H200)"
_BLACKWELL = "mma.sync's rate is unknown: A100's is assumed"
_GEFORCE = "mma.sync from the 209.5 dense TFLOP/s of bf16 with sums in fp32 that its white paper states"

GPUS = (
    Gpu("H200", "sm_90a", 132, 1.755, 4800, 2560, f"clock under load; {_HOPPER}"),
    Gpu("H100 SXM", "sm_90a", 132, 1.755, 3350, 2560, f"clock as H200; {_HOPPER}"),
    Gpu("B200", "sm_100a", 148, 1.85, 8000, 2048, f"clock assumed; {_BLACKWELL}"),
    Gpu("B300", "sm_103a", 148, 1.85, 8000, 2048, f"clock assumed; {_BLACKWELL}"),
    Gpu("RTX 5090", "sm_120a", 170, 2.407, 1792, 512, f"boost clock; {_GEFORCE}"),
    Gpu("GB10", "sm_121a", 48, 2.4, 273, 512, "clock assumed; tensor cores as RTX 5090"),
)


def of_arch(arch: str) -> list[Gpu]:
    """Returns the GPUs of an architecture, the one that verdicts are about first."""
    return [gpu for gpu in GPUS if gpu.arch == arch]
