"""Which query tiles a CTA works on, in which order."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_attn.kernels.blocks import sm90
from cute_attn.kernels.blocks.rows import Divisor


class TileWork(NamedTuple):
    """One query tile: rows from `first` of one head of one request."""

    first: Int32
    head: Int32
    kv_head: Int32
    batch: Int32


@dataclass(frozen=True)
class DenseTiles:
    """Tiles of requests of one length. A section of heads, few enough for L2 to hold their keys and values, is done
    before the next begins; within it heads lie side by side, last rows first: the longest under a causal mask.
    """

    total: Int32
    section_tiles: Divisor
    section_heads: Divisor
    heads: Divisor
    group: Divisor
    last_block: Int32
    rows: int

    def decode(self, index: Int32) -> TileWork:
        section = self.section_tiles.quotient(index)
        within = index - section * self.section_tiles.value
        block = self.section_heads.quotient(within)
        place = section * self.section_heads.value + within - block * self.section_heads.value
        batch = self.heads.quotient(place)
        head = place - batch * self.heads.value
        return TileWork((self.last_block - block) * self.rows, head, self.group.quotient(head), batch)


@dataclass(frozen=True)
class StaticSchedule:
    """Every grid-size-th tile."""

    def draw(self, index: Int32) -> Int32:
        return index

    def following(self, drawn: Int32, total: Int32) -> Int32:
        return drawn + cute.arch.grid_dim()[0]


@dataclass(frozen=True)
class DynamicSchedule:
    """Tiles in the order in which CTAs become free, drawn from a counter that the last draw of a launch sets to 0.

    `draw` early, so that nobody waits for the atomic's answer, and ask for `following` when it is needed.
    """

    counter: Int64

    def draw(self, index: Int32) -> Int32:
        return sm90.atomic_increment(self.counter)

    @cute.jit
    def following(self, drawn: Int32, total: Int32) -> Int32:
        # Every tile past the first of each CTA is drawn once, and each CTA draws in vain once: `total` draws.
        if drawn == total - 1:
            sm90.st_global_u32(self.counter, Int32(0))
        return drawn + cute.arch.grid_dim()[0]
