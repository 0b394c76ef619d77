"""FlashAttention-3 for Hopper (Shah et al. 2024): TMA, wgmma and specialised warps.

A persistent CTA processes query tiles of `tile.rows` packed rows. A producer warp copies for the MMA warpgroups:

    producer        K0 Q V0 K1 V1 K2 V2 ...                       (rings of slots, across query tiles)
    MMA warpgroup   S0 | S1 + O(P0 V0), softmax 1 | S2 + O(P1 V1), softmax 2 | ... | O(Pn Vn) | store

With fp8 q, narrow K and V, or RoPE, transform warps make operands of the tiles that the producer copies.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import AnyParams, Maps, PersistentParams
from cute_attn.kernels.blocks.pipeline import SmemRings, WarpRole
from cute_attn.kernels.blocks.smem import CHUNK
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa3.mainloop import MmaWarpgroups
from cute_attn.kernels.fa3.parts.wgmma import WarpgroupTile
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.fa3.spec import Fa3Spec
from cute_attn.kernels.formats import LINE


class Fa3Program(PersistentProgram):
    """Hopper attention kernel for 16-bit q, k and v. Subclasses replace the tile, roles and composition."""

    spec: Fa3Spec
    tile_type: Any = WarpgroupTile
    mma_type = MmaWarpgroups

    def __init__(self, spec: Fa3Spec, arch: str) -> None:
        super().__init__(spec, HopperMemory.of(spec))
        self.mma = self.mma_type(self, spec, self.tile)

    def query_tile(self, p: AnyParams, index: Int32) -> QueryTile:
        tile = super().query_tile(p, index)
        return tile.from_first_key(p) if self.spec.tile.from_first_key else tile

    @cute.jit
    def prologue(self, p: AnyParams, rings: SmemRings, thread: Int32) -> None:
        """Sets the rows of q to zero that no copy fills, because a tile holds whole tokens: products read them."""
        rows = self.spec.tile.rows
        if p.tile_rows < rows:
            zeros = [Int32(0) for _ in range(4)]
            for column in cutlass.range(rings.q.stages * self.memory.qk_columns, unroll=1):
                unused = rings.q.data + (column * rows + p.tile_rows) * LINE
                for at in cutlass.range(thread * CHUNK, (rows - p.tile_rows) * LINE, self.block[0] * CHUNK, unroll=1):
                    ptx.st_shared_v4(unused + at, 0, zeros)
            tma.fence_async()

    @property
    def roles(self) -> list[WarpRole]:
        roles = [self.producer.role, self.mma.role]
        return [*roles, self.transform.role] if self.transform else roles

    @cute.jit
    def run_warps(self, params: AnyParams, maps: Maps, rings: SmemRings, thread: Int32) -> None:
        if thread < 128:
            tma.release_registers(self.spec.registers[0])
            if thread < 32 * self.producer.role.warps:
                self.producer.run(params, maps, rings)
            else:
                self.run_transform(params, rings, thread - 32)
        else:
            self.consumer_warpgroups(params, rings, thread)

    @cute.jit
    def consumer_warpgroups(self, params: AnyParams, rings: SmemRings, thread: Int32) -> None:
        """Runs the MMA warpgroups and, if the spec has more than three transform warps, the warpgroup of the rest."""
        if cutlass.const_expr(self.spec.tile.threads == 128 + self.mma.threads):
            self.run_mma(params, rings)
        else:
            if thread < 128 + self.mma.threads:
                self.run_mma(params, rings)
            else:
                tma.release_registers(self.spec.registers[0])
                self.run_transform(params, rings, thread - (32 + self.mma.threads))

    def run_mma(self, params: PersistentParams, rings: SmemRings) -> None:
        tma.claim_registers(self.spec.registers[1])
        self.mma.run(params, rings)

    def run_transform(self, params: PersistentParams, rings: SmemRings, thread: Int32) -> None:
        """Runs a warp behind the producer; `thread`: index among the transform warps. Without any, it is idle."""
        if self.transform:
            self.transform.run(params, rings, thread)
