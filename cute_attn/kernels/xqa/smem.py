"""Shared-memory map of the decode kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.kernels.blocks.smem_map import BARRIER_BYTES, MemoryMap, MemoryRegion
from cute_attn.kernels.formats import LINE
from cute_attn.kernels.xqa.spec import SCALE_BLOCK, XqaSpec

INBOX_BARRIERS = 1 + 2  # see `parts.warp_merge`


@dataclass(frozen=True)
class XqaMemory(MemoryMap):
    """Byte offsets in shared memory: a ring of `stages` slots per warp, the statistics of the merge, then the partial
    scores that the warps of a team exchange, or the states that the CTAs of a cluster send each other.

    A slot holds a warp's columns of K and V of `cols` tokens, then their block scales, if any. Between two segments the
    last slots of each warp's ring are free and hold the warp's outputs for the merge.
    """

    spec: XqaSpec
    rings = MemoryRegion(lambda m: m.spec.warps * m.ring_bytes)
    stats = MemoryRegion(lambda m: m.spec.warps * m.spec.rows * 8)  # (maximum, sum) per warp and row
    ticket = MemoryRegion(lambda m: 16)  # one word: the number of CTAs that had written their partials before this one
    # Two buffers per warp, whose tiles take turns.
    partial_scores = MemoryRegion(lambda m: 2 * m.spec.warps * m.score_bytes)
    inbox = MemoryRegion(lambda m: m.sent_vectors * 16)  # output vectors that the CTAs of a cluster send to this one
    inbox_stats = MemoryRegion(lambda m: m.sent_vectors * 8)  # (maximum, sum) of every vector sent
    # Words by which the CTAs of a cluster tell this one that it may send again, of the last two segments.
    freed = MemoryRegion(lambda m: 2 * 4 * m.spec.cluster_size if m.spec.cluster_size > 1 else 0)
    # Where a CTA of a cluster waits for vectors, and for these words.
    inbox_barriers = MemoryRegion(lambda m: INBOX_BARRIERS * BARRIER_BYTES if m.spec.cluster_size > 1 else 0)

    def __post_init__(self) -> None:
        if self.prefetch_distance < 1:
            raise ValueError(f"{self}: stages must leave a slot beside those that hold outputs")

    @property
    def tile_dim(self) -> int:
        return self.spec.tile_dim

    @property
    def row_bytes(self) -> int:
        """Distance of two tokens in K or V."""
        return self.spec.tile_dim * self.spec.kv_bits // 8

    @property
    def source_bytes(self) -> int:
        """Bytes of a warp's columns of K or V of one token."""
        return self.spec.warp_dim * self.spec.kv_bits // 8

    @property
    def loads(self) -> int:
        """Pairs of chunks that hold them: what an ldmatrix.x4 reads of a row."""
        return -(-self.source_bytes // 32)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the block scales of a warp's columns of K or V of one token."""
        return self.spec.warp_dim // SCALE_BLOCK if self.spec.kv_bits == 4 else 0

    @property
    def v(self) -> int:
        return self.spec.cols * self.row_bytes

    @property
    def k_scales(self) -> int:
        return 2 * self.v

    @property
    def v_scales(self) -> int:
        return self.k_scales + self.spec.cols * self.scale_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-(self.v_scales + self.spec.cols * self.scale_bytes) // LINE) * LINE

    @property
    def ring_bytes(self) -> int:
        return self.spec.stages * self.slot_bytes

    @property
    def prefetch_distance(self) -> int:
        """Tiles in flight while one is computed: the slots that the merge's outputs leave free."""
        return self.spec.stages - -(-self.output_bytes // self.slot_bytes)

    @property
    def outputs(self) -> int:
        """Offset in a warp's ring of its outputs, fp32 [rows, tile_dim]."""
        return self.prefetch_distance * self.slot_bytes

    @property
    def output_bytes(self) -> int:
        return self.spec.rows * self.spec.tile_dim * 4

    @property
    def score_bytes(self) -> int:
        """Bytes of a buffer of partial scores."""
        return self.spec.rows * self.spec.cols * 4 if self.spec.team > 1 else 0

    @property
    def inbox_vectors(self) -> int:
        """Vectors of four outputs that a CTA of a cluster merges, of which every CTA sends it its own."""
        return -(-self.output_bytes // 16 // self.spec.cluster_size)

    @property
    def sent_vectors(self) -> int:
        """Vectors that the CTAs of a cluster send to one."""
        return self.spec.cluster_size * self.inbox_vectors if self.spec.cluster_size > 1 else 0
