"""Tile schedulers of persistent CTAs: which query tiles, in which order, and how the other warps learn of them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_attn.kernels.blocks import ptx, tma
from cute_attn.kernels.blocks.masks import Band
from cute_attn.kernels.blocks.pipeline import PipelineState
from cute_attn.kernels.blocks.rows import PackedRows
from cute_attn.schedule.records import ITEM_INTS, Item

NO_WORK = -1
NEXT_TILE_WORD = 12  # of a record, after the fields of its tile


class QueryTile(NamedTuple):
    """Work item for one block of heads that share a tile, in 32-bit words, passed through shared memory."""

    head_block: Int32  # NO_WORK: no tiles are left
    qo_start: Int32
    qo_len: Int32
    kv_start: Int32
    kv_len: Int32
    first_row: Int32
    kv_begin: Int32
    kv_end: Int32
    partial: Int32
    mask_low: Int32
    mask_high: Int32

    def band(self, p: Any) -> Band:
        """Band of visible keys; `p.right` and `p.left` are relative to the end of the keys."""
        position = self.kv_len - self.qo_len  # of query token 0
        return Band(self.kv_end, position + p.left, position + p.right)

    def rows(self, p: Any) -> PackedRows:
        """Rows of the tile; those behind `p.tile_rows` belong to the next one and count as if they did not exist."""
        group, end = p.group.value, self.first_row + p.tile_rows
        count = ptx.minimum(self.qo_len * group, end)
        return PackedRows(self.first_row, count, p.group, self.head_block * group, self.qo_start)

    def from_first_key(self, p: Any) -> "QueryTile":
        """Returns the same work with the first key that its rows see as token 0 of the request's keys: kv tiles begin
        there.
        """
        first = self.rows(p).token(Int32(0)) + self.band(p).left
        base = ptx.minimum(ptx.maximum(self.kv_begin, first), self.kv_end)
        return self._replace(
            kv_start=self.kv_start + base, kv_len=self.kv_len - base, kv_begin=Int32(0), kv_end=self.kv_end - base
        )

    def kv_head(self, p: Any) -> Int32:
        return p.kv_group.quotient(self.head_block)

    def mask(self, p: Any) -> Int64:
        """Address of the first byte of the packed mask."""
        return p.mask + mask_offset(self.mask_low, self.mask_high)

    def store(self, address: Int32) -> None:
        words = [*self, Int32(0)]
        for i in range(0, len(words), 4):
            ptx.st_shared_v4(address, 4 * i, words[i : i + 4])

    @classmethod
    def load(cls, address: Int32) -> "QueryTile":
        words = [word for offset in (0, 16, 32) for word in ptx.ld_shared_v4(address, offset)]
        return cls(*map(cute.arch.make_warp_uniform, words[: len(cls._fields)]))


NO_TILE = (NO_WORK, *(0,) * (len(QueryTile._fields) - 1))


class SectionPosition(NamedTuple):
    """Position of a tile: a section of head blocks, few enough for L2 to hold their keys and values, is finished before
    the next begins; within it heads are innermost.
    """

    section: Int32
    within: Int32
    number: Int32  # of the tile among those of its head block

    @classmethod
    def of(cls, p: Any, index: Int32) -> "SectionPosition":
        section = p.section_tiles.quotient(index)
        within = index - section * p.section_tiles.value
        number = p.section_heads.quotient(within)
        return cls(section, within, number)

    def head_block(self, p: Any) -> Int32:
        heads = p.section_heads.value
        return self.section * heads + self.within - self.number * heads


@cute.jit
def tile_at(p: Any, index: Int32, existing: cutlass.Constexpr) -> Any:
    """Returns the query tile that `existing(p, index)` makes; `NO_TILE` from `p.total_tiles`."""
    tile = QueryTile(*(Int32(x) for x in NO_TILE))
    if index < p.total_tiles:
        tile = existing(p, index)
    return tile


def grid_tile(p: Any, index: Int32) -> QueryTile:
    """Returns a query tile of one request, splits of its keys outermost, then sections. The last rows come first, which
    are the longest under a causal mask.
    """
    split = p.split_tiles.quotient(index)
    position = SectionPosition.of(p, index - split * p.split_tiles.value)
    begin = split * p.split_tokens
    return QueryTile(
        head_block=position.head_block(p),
        qo_start=Int32(0),
        qo_len=p.qo_len,
        kv_start=Int32(0),
        kv_len=p.kv_len,
        first_row=(p.last_block - position.number) * p.tile_rows,
        kv_begin=begin,
        kv_end=ptx.minimum(begin + p.split_tokens, p.kv_len),
        partial=split,
        mask_low=Int32(0),
        mask_high=Int32(0),
    )


def item_tile(p: Any, index: Int32) -> QueryTile:
    """Returns a query tile of a batch: the plan's work items for every block of heads, in sections."""
    position = SectionPosition.of(p, index)
    item = load_item(p.items, position.number)
    head_block = position.head_block(p)
    head_block = ptx.select(item.qo_len == Int32(0), Int32(NO_WORK), head_block)
    return QueryTile(head_block, **{name: getattr(item, name) for name in QueryTile._fields[1:]})


def load_item(items: Int64, number: Int32) -> Item:
    """Loads a work item of the plan from device memory."""
    address = items + Int64(number) * Int64(4 * ITEM_INTS)
    words = [word for offset in (0, 16, 32) for word in ptx.ld_global_v4(address, offset)]
    return Item(*words[: len(Item._fields)])


def mask_offset(low: Int32, high: Int32) -> Int64:
    """Byte offset in the packed mask, from its two words."""
    low_word = Int64(low) & Int64(0xFFFFFFFF)
    return (Int64(high) << Int64(32)) | low_word


@dataclass(frozen=True)
class DynamicTileScheduler:
    """Dynamic scheduler: after its first tile, a CTA takes the next one when it becomes free. Two counters in device
    memory: tiles handed out, and CTAs that have finished. The last CTA to finish resets both to 0.

    Call `fetch_next` before the last copies of a tile: the atomic takes no longer than they do, and a tile fetched much
    earlier waits for its CTA while others run out of work. For all lanes of one warp.
    """

    counters: Int64
    thread: Int32

    def first(self) -> Int32:
        """Returns the index of the first tile."""
        return cute.arch.block_idx()[0]

    def draws(self) -> Boolean:
        """Whether this thread draws for all that share a tile."""
        return self.thread == 0

    def teams(self) -> Int32:
        """Returns how many draw: CTAs, or what shares a tile."""
        return cute.arch.grid_dim()[0]

    @cute.jit
    def fetch_next(self) -> Int32:
        fetched = Int32(0)
        if self.draws():
            fetched = tma.atomic_increment(self.counters)
        return fetched

    def broadcast_next(self, fetched: Int32, record: Int32, q: PipelineState) -> Int32:
        """Returns the index of the next tile to all threads. `record`, `q`: those of the tile before."""
        return ptx.shuffle_from(fetched, Int32(0)) + cute.arch.grid_dim()[0]

    @cute.jit
    def finish(self) -> None:
        if self.draws():
            stopped = tma.atomic_increment(self.counters + Int64(4))
            if stopped == self.teams() - 1:
                ptx.st_global_b32(self.counters, 0, Int32(0))
                ptx.st_global_b32(self.counters + Int64(4), 0, Int32(0))


@dataclass(frozen=True)
class WarpgroupTileScheduler(DynamicTileScheduler):
    """Dynamic scheduler of several warps: their first thread fetches the index and passes it on in the tile's record.
    The word is only overwritten after other tiles, whose barriers all threads have passed.
    """

    barrier: int  # named
    threads: int

    @cute.jit
    def broadcast_next(self, fetched: Int32, record: Int32, q: PipelineState) -> Int32:
        if self.thread == 0:
            ptx.st_shared_b32(record, 4 * NEXT_TILE_WORD, fetched + cute.arch.grid_dim()[0])
        tma.named_sync(Int32(self.barrier), self.threads)
        return cute.arch.make_warp_uniform(ptx.ld_shared_b32(record + Int32(4 * NEXT_TILE_WORD)))
