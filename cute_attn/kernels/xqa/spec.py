"""Compile key and shared memory of the decode kernel. Plain numbers: the host needs them without the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_attn.kernels.formats import KV_BITS
from cute_attn.runtime.spec import KernelSpec

LINE = 128  # bytes; the banks of shared memory once over

SCALE_BLOCK = 16  # elements of NVFP4 that share an e4m3 scale
PAIRED_ROWS = 4
OUT_DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class XqaSpec(KernelSpec):
    """Group, page size, strides, lengths, window, scales and sinks are run-time values."""

    kernel: ClassVar[str] = "xqa"
    dtype: str  # of q
    kv_dtype: str  # of KV_BITS; "": q's
    out_dtype: str
    head_dim: int
    tree: bool = False  # draft tokens see what mask bits say, instead of all before them
    row_blocks: int = 1  # x 8 packed query rows, which share one read of K and V
    cols: int = 32  # kv tokens of one warp's tile
    warps: int = 8
    stages: int = 3  # tiles of a warp's ring
    ctas: int = 1  # of a launch, that an SM is to hold
    paired: bool = False  # NVFP4 and at most PAIRED_ROWS rows, see `formats.Four`
    guests: int = 0  # of the next launch, for which they leave room: both bound the registers

    def __post_init__(self) -> None:
        memory = XqaMemory.of(self)
        rules = {
            f"head_dim must be one of {HEAD_DIMS}": self.head_dim in HEAD_DIMS,
            "cols must be 16 or a multiple of 32": self.cols == 16 or self.cols % 32 == 0,
            "paired needs NVFP4 and one block of rows": not self.paired or (self.kv_bits, self.row_blocks) == (4, 1),
            "stages must leave some beside those that hold outputs": memory.ahead >= 1,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{self}: {rule}")

    @property
    def rows(self) -> int:
        return 8 * self.row_blocks

    def row(self, column: Any) -> Any:
        """Query row of a column of S^T and O^T."""
        return column & (PAIRED_ROWS - 1) if self.paired else column

    @property
    def kv_bits(self) -> int:
        return KV_BITS[self.kv_dtype]

    @property
    def mma_dtype(self) -> str:
        """8 and 4 bits become fp16 exactly."""
        return self.dtype if self.kv_bits == 16 else "float16"


@dataclass(frozen=True)
class XqaMemory:
    """Byte offsets: a ring of `stages` slots for every warp, then what the warps exchange when they merge.

    A slot holds K and V of `cols` tokens, then their block scales if they have any. Between two segments the last
    slots of every warp's ring are free, and hold that warp's outputs for the merge.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    head_dim: int
    kv_bits: int

    @classmethod
    def of(cls, spec: XqaSpec) -> XqaMemory:
        return cls(spec.rows, spec.cols, spec.warps, spec.stages, spec.head_dim, spec.kv_bits)

    @property
    def row_bytes(self) -> int:
        """K or V of one token."""
        return self.head_dim * self.kv_bits // 8

    @property
    def scale_bytes(self) -> int:
        """Block scales of K or V of one token."""
        return self.head_dim // SCALE_BLOCK if self.kv_bits == 4 else 0

    @property
    def v(self) -> int:
        return self.cols * self.row_bytes

    @property
    def k_scales(self) -> int:
        return 2 * self.v

    @property
    def v_scales(self) -> int:
        return self.k_scales + self.cols * self.scale_bytes

    @property
    def slot_bytes(self) -> int:
        return -(-(self.v_scales + self.cols * self.scale_bytes) // LINE) * LINE

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.slot_bytes

    @property
    def ahead(self) -> int:
        """Tiles on their way while one is worked on: what the slots have room for that outputs leave free."""
        return self.stages - -(-self.merge_bytes // self.slot_bytes)

    @property
    def merge(self) -> int:
        """Within a warp's ring: its outputs, fp32 [rows, head_dim]."""
        return self.ahead * self.slot_bytes

    @property
    def merge_bytes(self) -> int:
        return self.rows * self.head_dim * 4

    @property
    def stats(self) -> int:
        """(maximum, sum) of every warp and row."""
        return self.warps * self.ring_bytes

    @property
    def ticket(self) -> int:
        """One word: how many CTAs had brought their parts before this one."""
        return self.stats + self.warps * self.rows * 8

    @property
    def bytes(self) -> int:
        return self.ticket + 16
