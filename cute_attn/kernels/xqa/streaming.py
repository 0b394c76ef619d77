"""The decode kernel whose copies run on from segment to segment: while the last tiles of a segment are computed, the
first ones of the next are on their way."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.scalars import shared_memory
from cute_attn.kernels.xqa.kernel import LoopState, SegmentWork, WarpTiles, XqaParams, XqaProgram
from cute_attn.kernels.xqa.parts import instructions as isa
from cute_attn.kernels.xqa.parts.pages import PagedKv, TokenPages
from cute_attn.kernels.xqa.parts.partition import make_partition
from cute_attn.kernels.xqa.parts.queries import QueryRows
from cute_attn.kernels.xqa.parts.scales import final_epilogue, log2_scale
from cute_attn.kernels.xqa.parts.stream_merge import StreamMerge


@dataclass(frozen=True)
class StreamWork(SegmentWork):
    """What a warp needs for one segment, and for the copies of the next."""

    next_kv: PagedKv
    next_tiles: WarpTiles
    runs_on: Boolean  # this segment has tiles enough, under whose computation the next one's are copied


class StreamProgram(XqaProgram):
    @cute.kernel
    def kernel(self, params: XqaParams) -> None:
        if cutlass.const_expr(self.pdl):
            ptx.grid_dependency_wait()
            ptx.grid_dependency_launch()
        partition = make_partition(self.spec, params)
        share, segment = partition.first_segment()
        merge = StreamMerge(
            self.spec, self.memory, self.team, params, shared_memory(),
            final_epilogue(params, self.format.dequant_factor), self.format,
        )  # fmt: skip
        query_rows = QueryRows(
            self.spec, self.memory, self.team, self.format, params, log2_scale(params, self.format.dequant_factor)
        )
        words = query_rows.load(segment)
        slot = self.ring_start()
        token_pages = self.load_prologue(params, segment, share, None, slot)
        while partition.overlaps(segment, share):
            own = self.segment_work(params, segment, share, query_rows.operands(words), query_rows.rows(segment))
            following = partition.next_segment(segment)
            work = self.stream_work(params, own, following, share)
            state = LoopState(work.softmax.start(), slot, self.first_pages(work, token_pages))
            for i in cutlass.range(0, work.warp_tiles.count, unroll=1):
                state = self.mainloop_step(work, state, i)
            slot, token_pages = state.slot, state.token_pages
            words = query_rows.no_words()
            goes_on = partition.overlaps(following, share)
            ptx.sync_warp()  # all lanes are done with all slots
            if goes_on:
                words = query_rows.load(following)
            if isa.all_of([goes_on, work.warp_tiles.count < self.memory.prefetch_distance]):
                token_pages = self.load_prologue(params, following, share, None, slot)
            merge.place(self.warp(), self.advance(slot, self.memory.prefetch_distance))
            self.publish(merge, work.warp_tiles.split, state.running)
            self.write_output(merge, query_rows.rows(segment), segment, share, work.warp_tiles.split)
            segment = following
        ptx.cp_async_wait(0)

    def stream_work(self, p: XqaParams, own: SegmentWork, following, share) -> StreamWork:
        runs_on = own.warp_tiles.count >= self.memory.prefetch_distance
        kv, tiles = self.paged_kv(p, following), self.warp_tiles(p, following, share)
        return StreamWork(own.warp_tiles, own.kv, own.mask, own.queries, own.softmax, kv, tiles, runs_on)

    def first_pages(self, work: StreamWork, own: TokenPages) -> TokenPages:
        """Page ids of the tile that is copied first: where all own tiles are on their way, of the next segment."""
        all_copied = work.warp_tiles.count == self.memory.prefetch_distance
        wanted = isa.all_of([all_copied, work.next_tiles.count > 0])
        pages = work.next_kv.prefetch_page_ids(work.next_tiles.first, wanted)
        return TokenPages(
            [ptx.select(all_copied, a, b) for a, b in zip(pages.pages, own.pages, strict=True)],
            [ptx.select(all_copied, a, b) for a, b in zip(pages.offsets, own.offsets, strict=True)],
        )

    def source(self, work: StreamWork, i: Int32) -> tuple[PagedKv, Int32, Boolean]:
        """Behind the last own tile, the tiles of the next segment."""
        tiles, then = work.warp_tiles, work.next_tiles
        is_own, j = i < tiles.count, i - tiles.count
        kv = replace(
            work.kv,
            table=ptx.select(is_own, work.kv.table, work.next_kv.table),
            head=ptx.select(is_own, work.kv.head, work.next_kv.head),
            first_token=ptx.select(is_own, work.kv.first_token, work.next_kv.first_token),
            kv_len=ptx.select(is_own, work.kv.kv_len, work.next_kv.kv_len),
        )
        number = ptx.select(is_own, self.kv_tile(tiles, i), self.kv_tile(then, j))
        wanted = cutlass.or_(is_own, isa.all_of([work.runs_on, j < then.count]))
        return kv, number, wanted
