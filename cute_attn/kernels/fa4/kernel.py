"""FlashAttention-4 for data-centre Blackwell (sm_100a, sm_103a): TMA, tcgen05, tensor memory and specialised warps.

A persistent CTA, or a pair of them (`pair`), processes work items of two query tiles of 128 packed rows each:

    warp 0 (and 1)     producer: TMA copies of Q, K and V into rings of shared memory; two warps where they gather rows
    warp 2             tail: clears rows of V past the keys of a request
    warp 3             MMA: starts all products, S = Q K^T and O += P V, in tensor memory
    warps 4-7, 8-11    softmax of query tile 0, 1: S to P, a row per thread
    warps 12-15        epilogue: O to global memory, while the next work item is computed

Where O of a query tile fills half of the tensor memory (head dimension 256), a CTA has one query tile, of which two kv
tiles are in flight, no warps 8-11, and the epilogue instead of them.

Named after the kernel of Dao-AILab's flash-attention for Blackwell, whose division of labour it shares.
"""

from dataclasses import replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32
from cutlass.experimental.cuda.tensor_map import TensorMap

from cute_attn.kernels.blocks import ptx, sm100, tma
from cute_attn.kernels.blocks.kv_sources import TwoWarpGatheredKV
from cute_attn.kernels.blocks.masks import KeyBounds
from cute_attn.kernels.blocks.persistent import PersistentProgram
from cute_attn.kernels.blocks.persistent_params import OutputMaps, PersistentParams
from cute_attn.kernels.blocks.pipeline import SmemRings, WarpRole
from cute_attn.kernels.blocks.producer import ONE_CTA
from cute_attn.kernels.blocks.scores import RowAlibi
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile
from cute_attn.kernels.fa4.epilogue_warps import EpilogueWarps
from cute_attn.kernels.fa4.mma_warp import OneTileMmaWarp, TwoTileMmaWarp
from cute_attn.kernels.fa4.pair import CtaPair, PairRings
from cute_attn.kernels.fa4.parts.exp2 import PairExp2
from cute_attn.kernels.fa4.parts.row_masks import BandWords, MultiItemWords, PackedWords, StopWords
from cute_attn.kernels.fa4.parts.umma import BlackwellRings, RowLanes, TmemMap, UmmaTile
from cute_attn.kernels.fa4.smem import BlackwellMemory
from cute_attn.kernels.fa4.softmax_warps import SoftmaxWarps
from cute_attn.kernels.fa4.spec import Fa4Spec
from cute_attn.kernels.fa4.tail_warp import TailWarp

TAIL_WARP, MMA_WARP = 2, 3


class Fa4Program(PersistentProgram):
    """Blackwell attention kernel for 16-bit q, k and v. Subclasses replace the tile, roles and composition."""

    spec: Fa4Spec
    memory: BlackwellMemory
    tile: UmmaTile
    tile_type: Any = UmmaTile
    maps = OutputMaps._fields
    gathered_kv = TwoWarpGatheredKV
    softmax_warps_type: ClassVar[type[SoftmaxWarps]] = SoftmaxWarps

    def __init__(self, spec: Fa4Spec, arch: str) -> None:
        memory, pairs = BlackwellMemory.of(spec), spec.tile.ctas == 2
        super().__init__(spec, memory, CtaPair() if pairs else ONE_CTA)
        tile = self.tile
        self.rings_type = PairRings if pairs else BlackwellRings
        self.tail = TailWarp(self, spec, memory)
        self.mma = (TwoTileMmaWarp if spec.tile.query_tiles == 2 else OneTileMmaWarp)(self, spec, tile)
        self.softmax_warps = self.softmax_warps_type(self, spec, tile)
        self.epilogue = EpilogueWarps(self, spec, tile)

    @cute.kernel
    def kernel(
        self,
        q_map: GridConstant[TensorMap],
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        o_map: GridConstant[TensorMap],
        params: PersistentParams,
    ) -> None:
        self.run_cta(OutputMaps(*(tma.address_of(tensor_map) for tensor_map in (q_map, k_map, v_map, o_map))), params)

    @property
    def roles(self) -> list[WarpRole]:
        roles = [self.producer.role, self.mma.role, *self.softmax_warps.roles, self.epilogue.role]
        roles += [self.tail.role] if self.spec.clears_tail else []
        return [*roles, self.transform.role] if self.transform else roles

    @cute.jit
    def run_warps(self, params: PersistentParams, maps: OutputMaps, rings: SmemRings, thread: Int32) -> None:
        warp = cute.arch.make_warp_uniform(thread >> 5)
        tmem = TmemMap(ptx.ld_shared_b32(rings.scratch["tmem"]))
        if warp < 4:
            self.run_single_warps(params, maps, rings, tmem, warp)
        elif warp < 4 + 4 * self.spec.tile.query_tiles:
            tma.claim_registers(self.spec.registers[0])
            self.softmax_warps.run(params, rings, tmem, (warp >> 2) - 1)
        else:
            tma.release_registers(self.spec.registers[1])
            self.epilogue.run(params, maps.o_map, rings, tmem)

    @cute.jit
    def run_single_warps(
        self, params: PersistentParams, maps: OutputMaps, rings: SmemRings, tmem: TmemMap, warp: Int32
    ) -> None:
        tma.release_registers(self.spec.registers[2])
        if warp < self.producer.role.warps:
            self.producer.run(params, maps, rings)
        elif warp == MMA_WARP:
            if self.cta.leads():
                self.mma.run(params, rings, tmem)
        else:
            self.run_spare_warp(params, rings, warp)

    @cute.jit
    def run_spare_warp(self, params: PersistentParams, rings: SmemRings, warp: Int32) -> None:
        """Runs warp 1 or 2, of which the latter clears tails."""
        if cutlass.const_expr(self.spec.clears_tail):  # noqa: SIM102  (one when tracing, one at run time)
            if warp == TAIL_WARP:
                self.tail.run(params, rings)

    @cute.jit
    def prologue(self, p: PersistentParams, rings: SmemRings, thread: Int32) -> None:
        if cute.arch.make_warp_uniform(thread >> 5) == MMA_WARP:
            sm100.allocate(rings.scratch["tmem"], sm100.TMEM_COLUMNS, self.spec.tile.ctas)
        sm100.fence_before_sync()

    def prepare(self) -> None:
        sm100.fence_after_sync()

    @cute.jit
    def deallocate(self, rings: SmemRings, thread: Int32) -> None:
        sm100.fence_before_sync()
        self.cta.sync()
        sm100.fence_after_sync()
        if cute.arch.make_warp_uniform(thread >> 5) == MMA_WARP:
            sm100.deallocate(ptx.ld_shared_b32(rings.scratch["tmem"]), sm100.TMEM_COLUMNS, self.spec.tile.ctas)

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: Any, scales: list[Float32]) -> OnlineSoftmax:
        softmax = super().softmax(p, work, lanes, scales)
        return replace(softmax, exp2=PairExp2(self.spec.tile.polynomial))

    def alibi_step(self, p: PersistentParams, work: QueryTile, lanes: RowLanes) -> RowAlibi:
        return RowAlibi.of(work.rows(p), lanes.row(0), p.num_qo_heads)

    def mask(self, p: PersistentParams, work: QueryTile, lanes: RowLanes) -> StopWords:
        band, rows, row = work.band(p), work.rows(p), lanes.row(0)
        if self.spec.mask == "packed":
            return PackedWords(band, rows, row, work.mask(p), p.mask + p.mask_bytes, work.kv_len)
        if self.spec.mask == "multi_item":
            return MultiItemWords.of(band, rows, row, KeyBounds(p.mask, rows))
        return (BandWords if self.spec.mask == "band" else StopWords)(band, rows, row)
