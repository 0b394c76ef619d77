"""Compile keys of decode kernels: what they have in common, and that of the kernel on mma.sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from cute_attn.kernels.formats import KV_BITS, Ruled
from cute_attn.runtime.arch import Arch
from cute_attn.runtime.spec import KernelSpec

# How the CTAs of a launch divide segments, each of a request and a unit (`kernel.KINDS`): about equal shares, whole
# segments where those are as even; the same for every warp, those of a CTA of adjacent units, or for every cluster; a
# segment for every CTA, or for every warp as before.
Work = Literal["shares", "even", "whole", "heads", "cluster"]
WHOLE = ("whole", "heads")  # cut no segment
CLUSTER_REQUESTS = 64  # of a launch of clusters, at most
LONE_WARPS = ("even", "heads")  # whose warps have a unit each
SCALE_BLOCK = 16  # elements of NVFP4 that share an e4m3 scale
PAIRED_ROWS = 4  # query rows that `paired` allows
OUT_DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
WARP_DIM = 256  # head dims that one warp holds; more are shared by the warps of a team
MAX_HEAD_DIM = 512
HEAD_DIMS = (64, 128, 256)  # of which all default kernels are built


def is_head_dim(head_dim: int, kv_bits: int) -> bool:
    """Whether there are kernels for a head dim: each warp copies chunks of 16 bytes, and with NVFP4 its block scales of
    a token as one."""
    if kv_bits == 4:
        return head_dim in (64, 128, 256, 512)
    return 16 <= head_dim <= MAX_HEAD_DIM and head_dim % (128 // kv_bits * team_size(head_dim)) == 0


def team_size(head_dim: int) -> int:
    """Number of warps that share the columns of a tile."""
    return -(-head_dim // WARP_DIM)


def padded_dim(head_dim: int) -> int:
    """Columns of a warp's rows in shared memory, a power of two."""
    return max(32, 1 << (head_dim // team_size(head_dim) - 1).bit_length())


@dataclass(frozen=True)
class DecodeSpec(Ruled, KernelSpec):
    """What partition, merge, masks and host ask of every decode kernel. GQA group, page size, strides, lengths, window,
    scales and sinks are run-time values."""

    segment_overhead: ClassVar[int]  # cost of starting and finishing a segment, in tiles
    dtype: str  # of q
    kv_dtype: str  # a key of KV_BITS; "" means that of q
    out_dtype: str
    head_dim: int
    tree: bool = False  # mask bits decide which draft tokens a row sees, instead of causality

    @property
    def rows(self) -> int:
        """Packed query rows of a CTA."""
        raise NotImplementedError

    @property
    def cols(self) -> int:
        """KV tokens of a tile."""
        raise NotImplementedError

    @property
    def ctas(self) -> int:
        """CTAs of a launch per SM."""
        return 1

    @property
    def teams(self) -> int:
        """Tiles of a segment that a CTA processes at once."""
        return 1

    @property
    def heads(self) -> int:
        """Units that a CTA has at a time: one, or one for each warp. They divide the kv heads."""
        return 1

    @property
    def cluster_size(self) -> int:
        """CTAs that have a share together."""
        return 1

    @property
    def work(self) -> Work:
        return "shares"

    @property
    def whole(self) -> bool:
        """Whether no segment is cut: every one has a CTA or a warp of its own."""
        return self.work in WHOLE

    @property
    def kv_bits(self) -> int:
        return KV_BITS[self.kv_dtype]


@dataclass(frozen=True)
class XqaSpec(DecodeSpec):
    """Compile key of the decode kernel on mma.sync."""

    kernel: ClassVar[str] = "xqa"
    segment_overhead: ClassVar[int] = 4
    row_blocks: int = 1  # blocks of 8 packed query rows that share one read of K and V
    cols: int = 32  # of a warp's tile
    warps: int = 8
    stages: int = 3  # slots of a warp's ring, one tile each
    ctas: int = 1
    paired: bool = False  # NVFP4 with at most PAIRED_ROWS query rows, see `formats.Kv4Bit`
    guests: int = 0  # CTAs of the next launch that must fit beside them; ctas + guests bound the registers
    work: Work = "shares"
    cluster_size: int = 1  # CTAs of a cluster that merge in shared memory
    # First tiles of a warp that are fetched into L2 before the preceding kernel has ended (`parts.ahead`); if any, all
    # that its ring holds are copied, as soon as that has ended, from where they were before.
    prefetch: int = 0

    def rules(self) -> dict[str, bool]:
        return {
            "head_dim must be that of whole chunks": is_head_dim(self.head_dim, self.kv_bits),
            "warps must be whole teams": self.warps % self.team == 0,
            "cols must be 16 or a multiple of 32": self.cols == 16 or self.cols % 32 == 0,
            f"work must be one of {get_args(Work)}": self.work in get_args(Work),
            "clusters, and they alone, have several CTAs": (self.work == "cluster") == (self.cluster_size > 1),
            "clusters and heads of a warp need columns that a warp holds": self.team == 1
            or self.work in ("shares", "whole"),
            "prefetch must not be negative, and 0 of keys with block scales and of shares of warps": self.prefetch == 0
            or (self.prefetch > 0 and self.kv_bits > 4 and self.work != "even"),
            "paired needs NVFP4 and one block of rows": not self.paired or (self.kv_bits, self.row_blocks) == (4, 1),
        }

    @property
    def rows(self) -> int:
        return 8 * self.row_blocks

    @property
    def team(self) -> int:
        """Warps that share the columns of a tile."""
        return team_size(self.head_dim)

    @property
    def teams(self) -> int:
        return 1 if self.work in LONE_WARPS else self.warps // self.team

    @property
    def heads(self) -> int:
        return self.warps if self.work in LONE_WARPS else 1

    @property
    def warp_dim(self) -> int:
        """Head dims of a warp."""
        return self.head_dim // self.team

    @property
    def tile_dim(self) -> int:
        """Columns of a warp's rows in shared memory: those from `warp_dim` on are padding."""
        return padded_dim(self.head_dim)

    def row(self, column: Any) -> Any:
        """Query row of a column of S^T and O^T."""
        return column & (PAIRED_ROWS - 1) if self.paired else column

    def reads_blocks(self, arch: Arch) -> bool:
        """Whether lanes of a warp read whole scale blocks of NVFP4, see `parts.layouts.BlockReads`: these need 16 rows
        of 16 bytes of scales."""
        scales = self.cols * self.warp_dim // SCALE_BLOCK
        return self.kv_bits == 4 and arch.converts_e2m1 and not self.paired and self.warp_dim >= 128 and scales >= 256

    @property
    def mma_dtype(self) -> str:
        """Type of the MMA operands: 8- and 4-bit elements convert to fp16 exactly."""
        return self.dtype if self.kv_bits == 16 else "float16"


CTA_REQUESTS = 128  # whose lengths a CTA computes, one per thread


@dataclass(frozen=True)
class LengthsSpec(KernelSpec):
    """Compile key of the kernel that computes the lengths of paged requests; there is one."""

    kernel: ClassVar[str] = "lengths"
    needs_mma: ClassVar[bool] = False
