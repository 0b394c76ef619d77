"""What a CTA does of a work item, where the CTAs of a cluster may share one."""

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.persistent_params import Maps
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring
from cute_attn.kernels.blocks.smem_map import TileMemory
from cute_attn.kernels.blocks.tile_scheduler import DynamicTileScheduler
from cute_attn.kernels.blocks.tma_kv import TmaOperand


class CtaLoads:
    """TMA loads of a CTA, at its own barriers."""

    def expect(self, barrier: Int32, num_bytes: int) -> None:
        """Arrives at the full barrier of a slot, which `num_bytes` of loads will fill."""
        tma.barrier_expect(barrier, num_bytes)

    def load_4d(self, shared: Int32, tensor_map: Int64, place: list[Int32], barrier: Int32, policy: int) -> None:
        tma.load_4d(shared, tensor_map, place, barrier, policy)


@dataclass(frozen=True)
class OneCta:
    """CTA that processes work items alone."""

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        """Dimensions of a cluster; None: the kernel is launched without."""
        return None

    @property
    def producer_rings(self) -> tuple[str, ...]:
        """Names of rings by which the producers of a cluster agree."""
        return ()

    def leads(self) -> Boolean:
        """Whether this CTA does what is done once per work item."""
        return Boolean(True)

    def sync(self) -> None:
        """Waits for all threads that share work items."""
        ptx.sync_threads()

    def loads(self) -> CtaLoads:
        return CtaLoads()

    def operands(self, maps: Maps, memory: TileMemory, cols: int) -> tuple[TmaOperand, TmaOperand]:
        """Returns the parts of K and V that this CTA loads of every kv tile."""
        return TmaOperand(maps.k, memory.loaded_k, cols), TmaOperand(maps.v, memory.loaded_v, cols)

    def q_boxes(self, rows: int) -> list[tuple[Int32, int]]:
        """Returns the rows that this CTA loads of a work item of `rows` rows: first row of a box, and where it goes."""
        return [(Int32(0), 0)]

    def q_rows(self, rows: int) -> int:
        """Returns how many rows these are in all."""
        return rows

    def drain(self, ring: Ring, state: PipelineState) -> None:
        """Waits, after the last load, for releases that others may send until they exit."""

    def scheduler(self, counters: Int64, thread: Int32, rings: Any) -> DynamicTileScheduler:
        return DynamicTileScheduler(counters, thread)


ONE_CTA = OneCta()
