"""Pairs of CTAs that share K and V: neighbouring query rows of the same heads, on two SMs.

Each CTA loads half of the columns of every K and V tile into the shared memory of both (multicast), so that L2 is read
once for both. A slot is filled where both CTAs' warps have released it: they do so at the barriers of both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import cluster, tma
from cute_attn.kernels.blocks.cta import CtaLoads, OneCta
from cute_attn.kernels.blocks.pairs import CTAS, LeaderRing, PairTileScheduler
from cute_attn.kernels.blocks.persistent_params import Maps
from cute_attn.kernels.blocks.pipeline import PipelineState, Ring, SmemRings
from cute_attn.kernels.blocks.smem_map import TileMemory
from cute_attn.kernels.blocks.tile_scheduler import DynamicTileScheduler
from cute_attn.kernels.blocks.tma_kv import TmaOperand
from cute_attn.kernels.fa3.kernel import Fa3Program
from cute_attn.kernels.fa3.mainloop import MmaWarpgroups
from cute_attn.kernels.fa3.parts.register_q import RegisterQTile
from cute_attn.kernels.fa3.parts.wgmma import WARPGROUP_ROWS, WarpgroupLanes, WarpgroupTile
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec

CTA_ADDRESS = (1 << 18) - 1  # bits of an address within a CTA


class SharedRing(Ring):
    """Ring whose slots the producers of both CTAs fill in both, and whose readers release them in both."""

    def initialise(self, writers: int, readers: int) -> None:
        super().initialise(writers, CTAS * readers)

    @cute.jit
    def release(self, state: PipelineState, lane: Int32) -> None:
        if lane < CTAS:
            cluster.barrier_arrive_cta(cluster.in_each(self.empty(state), lane))


@dataclass(frozen=True)
class SharedRings(SmemRings):
    """Rings of a CTA of a pair."""

    types: ClassVar[Mapping[str, type[Ring]]] = {"k": SharedRing, "v": SharedRing, "next": LeaderRing}

    @classmethod
    def of(cls, memory: TileMemory, base: Int32) -> "SharedRings":
        rings = SmemRings.of(memory, base)
        by_name = {
            name: cls.types.get(name, Ring)(ring.stages, ring.slot_bytes, ring.data, ring.barriers)
            for name, ring in rings.by_name.items()
        }
        return cls(by_name, by_name["k"], by_name["v"], rings.records, rings.scratch)


@dataclass(frozen=True)
class SharedOperand(TmaOperand):
    """Columns of K or V that this CTA loads for both; as many come from the other one."""

    @property
    def bytes(self) -> int:
        return CTAS * super().bytes

    def place(self, column: int) -> Int32:
        return (self.first_column + Int32(column)) * (self.keys * self.rows.pitch)


class MulticastLoads(CtaLoads):
    """TMA loads into the same place of both CTAs, whose bytes count at the barrier of each."""

    def load_4d(self, shared: Int32, tensor_map: Int64, place: list[Int32], barrier: Int32, policy: int) -> None:
        tma.load_4d_to_pair(shared, tensor_map, place, barrier, policy)


class SharingCta(OneCta):
    """CTA of a pair; that of rank r has the r-th half of the rows of a work item."""

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (CTAS, 1, 1)

    @property
    def producer_rings(self) -> tuple[str, ...]:
        return ("next",)

    def sync(self) -> None:
        cluster.sync()

    def kv_loads(self) -> CtaLoads:
        return MulticastLoads()

    def operands(self, maps: Maps, memory: TileMemory, cols: int) -> tuple[TmaOperand, TmaOperand]:
        halves = []
        for tensor_map, rows in ((maps.k, memory.loaded_k), (maps.v, memory.loaded_v)):
            columns = rows.columns // CTAS
            first = cluster.rank() * columns
            halves.append(SharedOperand(tensor_map, rows._replace(columns=columns), cols, first_column=first))
        return halves[0], halves[1]

    def q_boxes(self, rows: int) -> list[tuple[Int32, int]]:
        return [(cluster.rank() * (rows // CTAS), 0)]

    def q_rows(self, rows: int) -> int:
        return rows // CTAS

    def scheduler(self, counters: Int64, thread: Int32, rings: SmemRings) -> DynamicTileScheduler:
        return PairTileScheduler(counters, thread, rings.by_name["next"])


@dataclass(frozen=True)
class SharingLanes(WarpgroupLanes):
    """Position of a thread among the MMA threads of its CTA, whose rows follow those of the CTAs of lower rank."""

    @property
    def first_row(self) -> Int32:
        ctas_rows = cluster.rank() * ((cluster.threads() >> 7) - 1)
        return (ctas_rows + self.warpgroup) * WARPGROUP_ROWS


@dataclass(frozen=True)
class SharingTile(WarpgroupTile):
    def in_cta(self, address: Int32) -> Int32:
        """Removes the rank of the CTA."""
        return address & Int32(CTA_ADDRESS)


class SharingRegisterQTile(SharingTile, RegisterQTile):
    """Such a tile with columns of q in registers."""


class SharingMmaWarpgroups(MmaWarpgroups):
    lanes_type = SharingLanes


class SharingProgram(Fa3Program):
    """Hopper kernel of pairs of CTAs that share K and V."""

    rings_type = SharedRings
    mma_type = SharingMmaWarpgroups

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        super().__init__(spec, arch)
        self.cluster = (CTAS, 1, 1)

    def cta_of(self, spec: Fa3Spec) -> OneCta:
        return SharingCta()

    def warpgroup_tile(self, spec: Fa3Spec, memory: HopperMemory) -> WarpgroupTile:
        return (SharingRegisterQTile if spec.tile.q_columns else SharingTile)(spec.dtype, memory)

    def deallocate(self, rings: SmemRings, thread: Int32) -> None:
        """Keeps this CTA's shared memory until the other one, which writes it and arrives there, has finished too."""
        self.cta.sync()
