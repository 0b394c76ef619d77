"""Compile keys of the kernels for latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cute_attn.kernels.xqa.spec import DecodeSpec

KV_DTYPES = ("", "float8_e4m3fn")
LATENT, ROPE = 512, 64  # columns of a row of the cache: keys and values, and keys only
GROUP = 128  # latent columns with one scale, where `CacheForm.grouped`


class CacheForm(NamedTuple):
    """What a row of the latent cache holds."""

    kv_dtype: str = ""  # of latent numbers: one of KV_DTYPES; "" means that of the queries
    rope_bits: int = 16  # of a rotated number: as many as of latent ones, or 0 without any
    # Each GROUP latent numbers of 8 bits have a scale of their own. Rotated ones may then have the queries' dtype.
    grouped: bool = False


@dataclass(frozen=True)
class LatentSpec(DecodeSpec):
    """Compile key of both kernels."""

    rope_bits: int = 16  # these two: see `CacheForm`
    grouped: bool = False

    def rules(self) -> dict[str, bool]:
        return {
            f"head_dim must be {LATENT}": self.head_dim == LATENT,
            f"kv_dtype must be one of {KV_DTYPES}": self.kv_dtype in KV_DTYPES,
            "rope_bits must be those of latent numbers, 0, or 16 beside scales of groups": self.rope_bits
            in (self.kv_bits, 0, 16 if self.grouped else 0),
            "scales of groups need numbers of 8 bits": not self.grouped or self.kv_bits == 8,
        }

    @property
    def columns(self) -> int:
        """Columns of a query, and of a row of the cache."""
        return LATENT + (ROPE if self.rope_bits else 0)


@dataclass(frozen=True)
class MlaSpec(LatentSpec):
    """Compile key of the kernel on mma.sync. The warps form `row_groups`: those of a group have the same rows, and
    share the tokens of the scores and the columns of the outputs."""

    kernel: ClassVar[str] = "mla"
    instructions: ClassVar[str] = "mma.sync"
    segment_overhead: ClassVar[int] = 2  # not measured
    rows: int = 16
    cols: int = 64
    stages: int = 2  # slots of a tile each
    warps: int = 8

    def rules(self) -> dict[str, bool]:
        return super().rules() | {
            "rows must be 16 or a multiple of 32": self.rows == 16 or self.rows % 32 == 0,
            "each warp of a row group must have tokens in blocks of 8": self.cols % (8 * self.slices) == 0,
            "every thread must copy tokens of a tile": 8 * self.cols % (32 * self.warps) == 0,
            "there must be 2 stages or more": self.stages >= 2,
        }

    @property
    def row_groups(self) -> int:
        return min(2, self.rows // 16)

    @property
    def slices(self) -> int:
        """Warps of a row group."""
        return self.warps // self.row_groups

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True)
class HopperMlaSpec(LatentSpec):
    """Compile key of the kernel on wgmma: 64 query rows by 64 tokens, two MMA warpgroups and one of producer warps."""

    kernel: ClassVar[str] = "mla_wgmma"
    instructions: ClassVar[str] = "wgmma"
    segment_overhead: ClassVar[int] = 2  # not measured
    rows: ClassVar[int] = 64
    cols: ClassVar[int] = 64
    stages: ClassVar[int] = 2  # slots of a tile each, as many as shared memory holds
    mma_threads: ClassVar[int] = 256
    threads: ClassVar[int] = 384

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer thread and of an MMA thread. Producers of 8-bit caches hold half a tile."""
        return (104, 200) if self.kv_bits == 8 else (56, 216)


AnyMlaSpec = MlaSpec | HopperMlaSpec
