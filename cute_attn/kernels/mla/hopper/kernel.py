"""Latent attention (MLA) with absorbed queries over a paged latent cache, on wgmma (sm_90).

    a CTA's share of the work (`xqa.parts.partition`)   segment | segment | segment ...
    producer warpgroup                                  query rows, then tiles of 64 tokens, half by half
    MMA warpgroups (`warpgroups`)                       S, P and half of the output columns each
    the end of a segment                                outputs, or partial results, from registers to global memory
                                                        CTAs merge segments that were cut (`merge`)

Any number of query rows takes 64: fewer cost no more than their keys' way through memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.dequant import fp8_converter
from cute_attn.kernels.blocks.epilogue import FinalEpilogue, Target
from cute_attn.kernels.blocks.fragment_store import WarpgroupStore
from cute_attn.kernels.blocks.pipeline import start
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.kernels.blocks.scalars import device_scale, shared_memory, warp_index
from cute_attn.kernels.blocks.softmax import Running
from cute_attn.kernels.mla.hopper.merge import SegmentMerge
from cute_attn.kernels.mla.hopper.producer import NarrowProducer, Producer
from cute_attn.kernels.mla.hopper.rings import Rings, SegmentRecord
from cute_attn.kernels.mla.hopper.warpgroups import BOTH, TOTALS_BARRIER, MmaWarpgroup
from cute_attn.kernels.mla.parts.softmax import CausalMask
from cute_attn.kernels.mla.program import LatentProgram, MlaParams
from cute_attn.kernels.mla.smem import HopperMlaMemory
from cute_attn.kernels.mla.spec import HopperMlaSpec
from cute_attn.kernels.xqa.parts.partition import EvenPartition
from cute_attn.kernels.xqa.parts.team import LoneWarp

SWITCH = 4  # tiles in whose time a CTA ends a part of a segment and begins another


class LatentPartition(EvenPartition):
    """Partition of CTAs that are bound by computing: the one with the largest share ends last."""

    def spare(self, size: Int32) -> Int32:
        return Int32(SWITCH)


class HopperMlaProgram(LatentProgram):
    """The kernel of one spec."""

    memory_type = HopperMlaMemory
    spec: HopperMlaSpec

    @cute.kernel
    def kernel(self, params: MlaParams) -> None:
        rings = Rings(self.memory, shared_memory())
        if cute.arch.thread_idx()[0] == 0:
            rings.initialise()
        ptx.grid_dependency_wait()
        ptx.grid_dependency_launch()
        ptx.sync_threads()
        if warp_index() < BOTH // 32:
            tma.claim_registers(self.spec.registers[1])
            self.multiply(params, rings)
        else:
            tma.release_registers(self.spec.registers[0])
            self.produce(params, rings)

    # --- producer warpgroup ------------------------------------------------------------------------------------------

    def producer(self, p: MlaParams, rings: Rings) -> Producer:
        if self.spec.kv_bits == 16:
            return Producer(self.memory, p, rings)
        converter = fp8_converter(self.spec.dtype, self.spec.kv_dtype, self.arch)
        factor = ptx.select(p.scale == Float32(0.0), Float32(1.0), p.rope_scale * ptx.reciprocal(p.scale))
        return NarrowProducer(self.memory, p, rings, converter, factor)

    @cute.jit
    def produce(self, p: MlaParams, rings: Rings) -> None:
        """Copy the query rows and tiles of all segments."""
        producer, partition = self.producer(p, rings), LatentPartition(p, self.spec)
        share, segment = partition.first_segment()
        q, kv = start(), start()
        while partition.overlaps(segment, share):
            split = partition.split(segment, share)
            if split.active:
                tile = producer.tile(segment, split, split.begin)
                producer.hand_over(SegmentRecord.of(partition, segment, share, split), q)
                producer.copy_queries(partition.rows(segment), q)
                kv = producer.copy_tiles(tile, split, kv)
                q = rings.q.next(q)
            segment = partition.next_segment(segment, share)
        producer.end(q)

    # --- MMA warpgroups ----------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, p: MlaParams, rings: Rings) -> None:
        """Process the tiles of all segments."""
        scale = p.scale * device_scale(p.scale0) * Float32(ptx.LOG2E)
        mma = MmaWarpgroup(self.memory, rings, shared_memory(), scale)
        q, kv = start(), start()
        rings.q.wait_full(q)
        work = SegmentRecord.load(rings.record(q))
        while work.begin >= 0:
            mask = CausalMask.of(mma.place, work.rows(p), work.kv_len, work.diagonal)
            running, kv = mma.add_tiles(mask, work.split(), kv)
            # Read again: nothing of it stayed in registers.
            work = SegmentRecord.load(rings.record(q))
            rings.q.release(q, mma.place.lane)
            self.write(p, mma, running, work)
            q = rings.q.next(q)
            rings.q.wait_full(q)
            work = SegmentRecord.load(rings.record(q))

    @cute.jit
    def write(self, p: MlaParams, mma: MmaWarpgroup, running: Running, work: SegmentRecord) -> None:
        """Write the outputs of a segment, or of its part, which the last CTA merges."""
        rows, total = work.rows(p), mma.whole_totals(running)
        if work.whole != 0:
            self.store(p, mma, rows, running, total)
        else:
            threads = TOTALS_BARRIER, self.spec.mma_threads
            merge = SegmentMerge(self.spec, p, self.memory, LoneWarp(), shared_memory(), FinalEpilogue.of(p), *threads)
            partial = merge.partial_of(cute.arch.block_idx()[1], work.begin)
            self.store_state(merge, mma, rows, running._replace(total=total), partial)
            merge.merge_splits(rows, work.first_share, work.shares)

    def store(self, p: MlaParams, mma: MmaWarpgroup, rows: PackedRows, running: Running, total: list[Float32]) -> None:
        """Store the outputs of a whole segment; the first warpgroup stores lse."""
        place = mma.place
        columns = Int64(place.warpgroup * (place.dims * 2))
        lse = ptx.select(place.warpgroup == 0, p.lse, Int64(0))
        target = Target(self.spec.out_dtype, p.o + columns, p.o_stride_n, p.o_stride_h, lse, p.group.value)
        first = place.quad_lane == 0  # the store sums over the lanes of a quad
        total = [ptx.select(first, x, Float32(0.0)) for x in total]
        WarpgroupStore(place.outputs, place, rows, target, FinalEpilogue.of(p)).write(running.out, running.shift, total)

    @cute.jit
    def store_state(
        self, merge: SegmentMerge, mma: MmaWarpgroup, rows: PackedRows, running: Running, partial: Int32
    ) -> None:
        """Store the state of this CTA's part of a segment: unnormalised outputs, maxima and sums."""
        place = mma.place
        layout, first = place.outputs, place.warpgroup * place.dims + place.first_col()
        for slot in cutlass.range_constexpr(len(layout.slots)):
            row = place.row(slot)
            stats, outputs = merge.partial_address(partial, row)
            if rows.exists(row):
                for i, column in layout.pairs(slot):
                    ptx.st_global_v2_f32(outputs + Int64(first * 4), column * 4, running.out[i : i + 2])
                if cutlass.and_(place.quad_lane == 0, place.warpgroup == 0):
                    ptx.st_global_v2_f32(stats, 0, [Float32(0.0) - running.shift[slot], running.total[slot]])
