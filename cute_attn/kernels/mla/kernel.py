"""Latent attention (MLA) with absorbed queries over a paged latent cache, on mma.sync, for any GPU since sm_80.

    a CTA's share of the work (`xqa.parts.partition`)   segment | segment | segment ...
    all warps                                           row tile of Q once, then per tile of tokens:
        copies                                          rows of 576 columns, one tile or more ahead
        numbers of 8 bits to 16                         a thread: those that it has copied
        S = Q K^T                                       a warp: its rows, its tokens, all 576 columns
        maxima and P through shared memory              among the warps that have the same rows
        O += P V                                        a warp: its rows, all tokens, its part of 512 columns
    the end of a segment (`xqa.parts.merge`)            outputs to shared memory; CTAs merge in global memory

A tile is copied once and read twice: V is the first 512 columns of K.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.dequant import fp8_converter
from cute_attn.kernels.blocks.epilogue import FinalEpilogue
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import device_scale, shared_memory
from cute_attn.kernels.blocks.softmax import Running
from cute_attn.kernels.mla.parts.copies import NarrowTileCopies, QueryCopies, TileCopies
from cute_attn.kernels.mla.parts.products import Place, Products
from cute_attn.kernels.mla.parts.softmax import CausalMask, Exchange, SharedSoftmax
from cute_attn.kernels.mla.program import LatentProgram, MlaParams
from cute_attn.kernels.mla.smem import MlaMemory
from cute_attn.kernels.mla.spec import MlaSpec
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.merge import StateMerge
from cute_attn.kernels.xqa.parts.pages import TokenPages
from cute_attn.kernels.xqa.parts.partition import KvSplit, Partition, Segment, Share
from cute_attn.kernels.xqa.parts.team import LoneWarp

Scales = tuple[Float32, Float32]


class LoopState(NamedTuple):
    """State from tile to tile: accumulators, the slot of the next tile to compute, and places of the next to copy."""

    running: Running
    slot: Int32
    places: TokenPages


class MlaProgram(LatentProgram):
    """The kernel of one spec, for one architecture."""

    memory_type = MlaMemory
    spec: MlaSpec

    @cute.kernel
    def kernel(self, params: MlaParams) -> None:
        if cutlass.const_expr(self.arch.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        partition = Partition(params, self.spec)
        share, segment = partition.first_segment()
        finish = FinalEpilogue.of(params)
        threads = self.spec.threads  # all, at the CTA's barrier
        merge = StateMerge(self.spec, params, self.memory, LoneWarp(), shared_memory(), finish, 0, threads)
        factor = device_scale(params.scale0) * Float32(ptx.LOG2E)
        scales = params.scale * factor, params.rope_scale * factor
        while partition.overlaps(segment, share):
            split = partition.split(segment, share)
            if split.active:
                rows = partition.rows(segment)
                self.compute(params, merge, rows, segment, split, scales)
                self.write_output(merge, rows, segment, share, split)
            segment = partition.next_segment(segment, share)

    # --- components -------------------------------------------------------------------------------------------------

    def tiles(self, p: MlaParams, segment: Segment) -> TileCopies:
        table = isa.mad_wide(segment.first_page, Int32(4), p.table)
        request = table, segment.request.kv_len
        if self.spec.kv_bits == 8:
            converter = fp8_converter(self.spec.dtype, self.spec.kv_dtype, self.arch)
            return NarrowTileCopies(self.memory, p, *request, shared_memory(), converter)
        return TileCopies(self.memory, p, *request)

    # --- phases -----------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(
        self, p: MlaParams, merge: StateMerge, rows: PackedRows, segment: Segment, split: KvSplit, scales: Scales
    ) -> None:
        """Process the tiles of a segment, and leave their outputs in shared memory."""
        place = Place.of_thread(self.spec)
        tiles = self.tiles(p, segment)
        softmax = SharedSoftmax(place, Exchange(self.memory, shared_memory(), place, place.scores))
        QueryCopies(self.memory, p).fetch(rows, shared_memory() + Int32(self.memory.q))
        places = self.start_copies(tiles, split)
        state = LoopState(softmax.rows.start(), shared_memory(), places)
        request = segment.request
        mask = CausalMask.of(place, rows, request.kv_len, request.kv_len - request.qo_len + 1 + p.right)
        for tile in cutlass.range(split.begin, split.end, unroll=1):
            state = self.add_tile((tiles, softmax, mask), state, tile, (split.end, scales))
        ptx.cp_async_wait(0)  # queries, where there is no tile
        ptx.sync_threads()
        softmax.publish(merge, state.running)

    def start_copies(self, tiles: TileCopies, split: KvSplit) -> TokenPages:
        """Start copying the first tiles. Returns the places of the tile that follows. Empty groups are committed too,
        so that counting groups counts tiles."""
        ahead = self.spec.stages - 1
        places = [tiles.places(split.begin + i, split.begin + i < split.end) for i in range(ahead + 1)]
        for i in range(ahead):
            tile = split.begin + i
            tiles.fetch(places[i], tile, tile < split.end, shared_memory() + Int32(i * self.memory.slot_bytes))
        return places[ahead]

    def add_tile(
        self,
        parts: tuple[TileCopies, SharedSoftmax, CausalMask],
        state: LoopState,
        tile: Int32,
        numbers: tuple[Int32, Scales],
    ) -> LoopState:
        """Process one tile. `numbers`: the split's end, and factors from products to base-2 exponents."""
        (tiles, softmax, mask), (end, scales), ahead = parts, numbers, self.spec.stages - 1
        products = Products(self.memory, softmax.place, shared_memory())
        ptx.cp_async_wait(ahead - 1)
        ptx.sync_threads()  # makes the tile visible; all warps are also done with the slot filled next
        tiles.fetch(state.places, tile + ahead, tile + ahead < end, self.advance(state.slot, ahead))
        places = tiles.places(tile + ahead + 1, tile + ahead + 1 < end)
        operand = tiles.operand(state.slot)
        s = products.scores(operand, scales)
        running = softmax.add_scores(state.running, mask.apply(s, tile * self.spec.cols))
        running = running._replace(out=products.accumulate(running.out, operand))
        return LoopState(running, self.advance(state.slot, 1), places)

    def advance(self, slot: Int32, steps: int) -> Int32:
        ring = self.memory.tile  # bytes
        moved = slot + Int32(steps * self.memory.slot_bytes)
        return ptx.select(moved >= shared_memory() + Int32(ring), moved - Int32(ring), moved)

    def write_output(self, merge: StateMerge, rows: PackedRows, segment: Segment, share: Share, split: KvSplit) -> None:
        merge.sync()
        merge.write(rows, segment, share, split)
        merge.sync()  # before the slots are filled again
