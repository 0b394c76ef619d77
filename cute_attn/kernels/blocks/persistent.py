"""Base of persistent attention kernels, whose CTAs process query tiles with specialised warps.

A family adds its rings (a `TileMemory`), its register layout (`tile`) and the roles of its warps beside the producer.
What the spec composes is made here: order of kv tiles, mask, score modifications, softmax and epilogues.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.attention_spec import PersistentSpec
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, PartialEpilogue, ScaledPartialEpilogue
from cute_attn.kernels.blocks.kv_sources import GatheredKV
from cute_attn.kernels.blocks.masks import KeyBounds, PackedMask, TileOrder
from cute_attn.kernels.blocks.persistent_params import AnyParams, Maps, PersistentParams
from cute_attn.kernels.blocks.pipeline import SmemRings, WarpRole
from cute_attn.kernels.blocks.producer import ONE_CTA, OneCta, Producer
from cute_attn.kernels.blocks.program import AttentionProgram, Epilogues
from cute_attn.kernels.blocks.scalars import head_scale
from cute_attn.kernels.blocks.scores import MIN_SCALE
from cute_attn.kernels.blocks.smem_map import TileMemory
from cute_attn.kernels.blocks.softmax import OnlineSoftmax
from cute_attn.kernels.blocks.tile_scheduler import QueryTile, grid_tile, item_tile


class PersistentProgram(AttentionProgram):
    """Attention kernel of persistent CTAs with TMA and specialised warps."""

    params: Any = PersistentParams  # or `extended` ones
    maps: tuple[str, ...] = Maps._fields
    rings_type = SmemRings
    gathered_kv = GatheredKV  # source of 16-bit rows that warps gather
    producer_type: type[Producer] = Producer
    tile_type: Any  # made of the operands' dtype and the memory: products, and how they lie in registers
    transform_type: Any = None  # `TransformWarps`, if any

    def __init__(self, spec: PersistentSpec, memory: TileMemory, cta: OneCta = ONE_CTA) -> None:
        self.spec, self.memory, self.cta = spec, memory, cta
        self.tile = self.tile_type(spec.operand_dtype, memory)
        self.block = (spec.tile.threads, 1, 1)
        self.smem_bytes = memory.bytes
        self.cluster, self.min_ctas = cta.cluster or (1, 1, 1), spec.tile.per_sm
        self.producer = self.producer_type(self)
        self.transform: Any = self.transform_type(self, spec, memory) if self.transform_type else None

    @property
    def roles(self) -> list[WarpRole]:
        """All roles, whose warps together arrive at every barrier of the rings."""
        raise NotImplementedError

    def query_tile(self, p: AnyParams, index: Int32) -> QueryTile:
        """Returns an existing query tile of a launch."""
        return (grid_tile if self.spec.schedule == "grid" else item_tile)(p, index)

    def run_warps(self, params: PersistentParams, maps: Any, rings: SmemRings, thread: Int32) -> None:
        """Runs the role of this thread's warp."""
        raise NotImplementedError

    def before_params(self, params: AnyParams) -> list[Any]:
        """Returns blank tensor maps, which give these arguments their type: launches pass their own."""
        sizes, strides = [Int32(64)] * 4, [Int64(128)] * 3
        blank = create_tensor_map_tiled(
            params.o, BFloat16, sizes, strides, [64, 64, 1, 1], swizzle=TensorMapSwizzle.s128b
        )
        return [blank for _ in self.maps]

    @cute.kernel
    def kernel(
        self,
        q_map: GridConstant[TensorMap],
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        params: AnyParams,
    ) -> None:
        self.run_cta(Maps(*(tma.address_of(tensor_map) for tensor_map in (q_map, k_map, v_map))), params)

    @cute.jit
    def run_cta(self, maps: Any, params: AnyParams) -> None:
        """Runs a CTA: prologue, roles, end. `maps`: a tuple with the names of `self.maps`."""
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint().to(Int32)
        rings = self.rings_type.of(self.memory, base)
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for tensor_map in maps:
                tma.prefetch_tensor_map(tensor_map)
            rings.initialise(self.roles)
            tma.fence_barrier_init()
        self.prologue(params, rings, thread)
        self.cta.sync()
        self.prepare()
        ptx.grid_dependency_wait()
        self.run_warps(params, maps, rings, thread)
        self.deallocate(rings, thread)

    def prologue(self, p: AnyParams, rings: SmemRings, thread: Int32) -> None:
        """Does what else a family needs before the barrier that ends the prologue, in all threads."""

    def prepare(self) -> None:
        """Follows that barrier, in all threads."""

    def deallocate(self, rings: SmemRings, thread: Int32) -> None:
        """Frees what `prologue` allocated, at the end of all roles."""

    # --- composition ------------------------------------------------------------------------------------------------

    def order(self, p: PersistentParams, work: QueryTile) -> TileOrder:
        """Returns the kv tiles of the whole query tile; mask bits are ignored, since they hide no tile."""
        shape = self.spec.tile
        first, last = work.kv_begin // shape.cols, (work.kv_end + Int32(shape.cols - 1)) // shape.cols
        order = work.band(p).tiles(work.rows(p), shape.rows, shape.cols, first, last)
        if self.spec.mask == "stop":  # no left edge: begin is full_begin, which ptxas can use
            return TileOrder(first, first, ptx.maximum(order.full_end, first), ptx.maximum(order.end, first))
        if self.spec.mask == "multi_item":
            return KeyBounds(p.mask, work.rows(p)).order(order, shape.cols)
        if self.spec.mask == "packed":
            return PackedMask.all_masked(order)
        return order.with_full(p.full_tiles) if self.spec.schedule == "items" and not self.spec.fp8 else order

    def softmax(self, p: PersistentParams, work: QueryTile, lanes: Any, scales: list[Float32]) -> OnlineSoftmax:
        layout = self.tile.scores_layout
        if self.spec.scores:
            scales = [Float32(ptx.LOG2E) for _ in layout.slots]
        elif self.spec.kv_dtype:  # scales of normalized rows, which may be as small as 0
            scales = [ptx.fmax(x, Float32(MIN_SCALE)) for x in scales]
        return OnlineSoftmax(layout, scales)

    def prepare_q(
        self, p: PersistentParams, work: QueryTile, lanes: Any, q_rows: Int32, scale: Float32
    ) -> list[Float32]:
        """Prepares the rows of q, for which 16-bit rows need nothing; returns the scales of the thread's row slots."""
        return [scale for _ in self.tile.scores_layout.slots]

    def epilogues(self, p: PersistentParams, work: QueryTile) -> Epilogues:
        """Computes both before the branch between them. fp8 v has a scale per head."""
        if not self.spec.fp8:
            final = FinalEpilogue.of(p)
            return lambda: final, PartialEpilogue
        head = head_scale(p.scale_v, work.kv_head(p))
        scaled = FinalEpilogue.of(p).scaled(head)
        return lambda: scaled, lambda: ScaledPartialEpilogue(head)

    def partial_row(self, p: PersistentParams, work: QueryTile) -> Int64:
        slot = Int64(work.partial) * Int64(p.head_blocks) + Int64(work.head_block)
        return slot * Int64(p.tile_rows)
