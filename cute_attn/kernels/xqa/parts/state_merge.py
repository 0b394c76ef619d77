"""Merge where all warps of a CTA have one state, which lies in shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import tma
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.xqa.parts.merge import VECTORS_PER_LANE, Merge, StateMemory
from cute_attn.kernels.xqa.parts.team import LoneWarp
from cute_attn.kernels.xqa.spec import DecodeSpec


@dataclass(frozen=True)
class StateMerge(Merge):
    """Merge by `threads` threads from the first of the CTA, which meet at a named barrier."""

    barrier: int
    threads: int

    @classmethod
    def of(
        cls,
        spec: DecodeSpec,
        memory: StateMemory,
        p: Any,
        base: Int32,
        finish: FinalEpilogue,
        barrier: int,
        threads: int,
    ) -> "StateMerge":
        return cls(spec, memory, LoneWarp(), p, base, finish, barrier, threads)

    @property
    def states(self) -> range:
        return range(1)

    @property
    def lanes(self) -> int:
        return self.threads

    def state_and_lane(self) -> tuple[Int32, Int32]:
        return Int32(0), cute.arch.thread_idx()[0]

    def sync(self) -> None:
        tma.named_sync(Int32(self.barrier), self.threads)

    @property
    def vectors_per_lane(self) -> int:
        return min(2 * VECTORS_PER_LANE, self.spec.rows * self.vectors_per_row // self.lanes)
