"""KernelSpec: everything that changes generated code, and nothing else. It is the compile key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

DTYPES = ("float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
OUT_DTYPES = (*DTYPES, "float32")
KV_BITS = {"": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "nvfp4": 4}  # of an element; "": q's dtype


class Program(Protocol):
    """A kernel ready to be traced: what `KernelSpec.program(arch)` returns.

    `params` is the NamedTuple class of kernel parameters: field order is parameter order, each field one
    scalar (`Int32`, `Int64`, `Float32`, `Float64` of cutlass). Pointers travel as `Int64` addresses.
    `kernel` is the `@cute.kernel` method: the compile step names it after `KernelSpec.symbol`. A program that
    launches clusters also has `cluster`, their dimensions in CTAs.
    """

    @property
    def params(self) -> Any: ...

    @property
    def kernel(self) -> Any: ...

    block: tuple[int, int, int]
    smem_bytes: int

    def compile_args(self) -> tuple[Any, ...]:
        """Arguments for `cute.compile(program, *compile_args())`: one Params of zeros, then the grid as three Int32."""

    def __call__(self, params: Any, grid_x: Any, grid_y: Any, grid_z: Any) -> None:
        """The `@cute.jit` host function that launches the kernel."""


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs. A subclass sets `kernel` and implements `program`."""

    kernel: ClassVar[str]
    needs_mma: ClassVar[bool] = True

    def program(self, arch: str) -> Program:
        """The traceable kernel for `arch` ("sm_90a", ...). Imports the DSL."""
        raise NotImplementedError

    def asdict(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **dataclasses.asdict(self)}

    def key(self) -> str:
        """Canonical text of the spec: equal specs, equal text."""
        return json.dumps(self.asdict(), sort_keys=True, separators=(",", ":"))

    @property
    def symbol(self) -> str:
        """Prefix of the kernel's symbol, which appears in profiles."""
        return f"cute_attn_{self.kernel}"


@dataclass(frozen=True)
class Tile:
    """Work of one CTA and its warps.

    `rows` query rows (token x head of one group) by `cols` kv tokens a step; warps are laid out
    `warps_rows` x `warps_cols`: with `warps_cols > 1` every warp owns its own kv columns and softmax state,
    merged once at the end. `stages` K/V tiles are in flight in shared memory.
    """

    rows: int
    cols: int
    warps_rows: int
    warps_cols: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_rows * self.warps_cols

    def __post_init__(self) -> None:
        loaders = self.threads if self.warps_cols == 1 else 32  # threads that copy the same rows, 8 to a row
        rules = {
            "rows must be a multiple of 16 for every warp row": self.rows % (16 * self.warps_rows) == 0,
            "cols must be a multiple of 16 for every warp column": self.cols % (16 * self.warps_cols) == 0,
            "cols must divide into whole passes of the copying threads": self.cols % (loaders // 8) == 0,
            "warps must be a power of two": self.threads & (self.threads - 1) == 0,
            "stages must be at least 2": self.stages >= 2,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{self}: {rule}")


@dataclass(frozen=True)
class Fa2Spec(KernelSpec):
    """The mma.sync attention kernel. Causal, window, GQA group, strides, lengths, page size and scales are run-time
    values.
    """

    kernel: ClassVar[str] = "fa2"
    dtype: str
    out_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    mask: str = "band"  # "band": causal/window/length bounds; "packed": custom mask bits and the band
    scores: tuple[str, ...] = ()  # in order of application, of "scale", "alibi", "soft_cap"
    pos_encoding: str = "none"  # "none" or "rope"
    split: bool = False  # schedule "grid": fp32 partials for the combine kernel instead of the output
    schedule: str = "grid"  # "grid": one request, work by place in the grid; "items": work items of a batch
    kv: str = "dense"  # "dense": tokens at a stride; "paged": pages in any order
    kv_dtype: str = ""  # of `KV_BITS`
    tile: Tile = Tile(128, 64, 4, 1, 2)

    def program(self, arch: str) -> Program:
        from cute_attn.kernels.fa2 import Fa2Program

        return Fa2Program(self, arch)


@dataclass(frozen=True)
class HopperTile:
    """Work of one CTA of the wgmma kernel: `rows` packed query rows, 64 a math warpgroup, by `cols` kv tokens.

    `stages` K and V tiles and `q_stages` query tiles are in flight; of those that are widened, `arriving` more as they
    are stored. `ping_pong`: warpgroups take turns at issuing products, so that one's softmax runs under another's.
    `helpers`: warps that make operands, where TMA does not bring them; beyond three there is a warpgroup for them.
    `q_registers`: math threads hold q there, and leave more of shared memory's bandwidth to the helpers.
    """

    rows: int
    cols: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = True
    arriving: int = 0
    helpers: int = 3
    q_registers: bool = False

    @property
    def math_groups(self) -> int:
        return self.rows // 64

    @property
    def threads(self) -> int:
        """A producer warpgroup, the math warpgroups, and maybe one of helpers."""
        return 128 * (1 + self.math_groups + (self.helpers > 3))

    def __post_init__(self) -> None:
        rules = {
            "rows must be 128 or 192": self.rows in (128, 192),
            "cols must be a multiple of 16 up to 256": self.cols % 16 == 0 and 0 < self.cols <= 256,
            "stages must be at least 2": self.stages >= 2,
            "q_stages must be 1 or 2": self.q_stages in (1, 2),
            "arriving must be 0 to 2": self.arriving in (0, 1, 2),
            "helpers must be 3 or 7, the latter of two math groups": self.helpers == 3
            or (self.helpers == 7 and self.math_groups == 2),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{self}: {rule}")


@dataclass(frozen=True)
class Fa3Spec(KernelSpec):
    """The Hopper attention kernel: TMA, wgmma, specialised warps. Causal and window bounds, GQA group, strides,
    lengths and page size are run-time values.
    """

    kernel: ClassVar[str] = "fa3"
    dtype: str
    out_dtype: str
    head_dim_qk: int
    head_dim_vo: int
    mask: str = "stop"  # "stop": length and causal bounds; "band": the window's too; "packed": custom bits and the band
    scores: tuple[str, ...] = ()  # in order of application, of "scale", "alibi", "soft_cap"
    split: bool = False  # schedule "grid": fp32 partials for the combine kernel instead of the output
    schedule: str = "grid"  # "grid": one request, tiles by arithmetic; "items": work items of a batch
    kv: str = "dense"  # "dense": tokens at a stride; "paged": pages in any order, by boxes; "gathered": row by row
    kv_dtype: str = ""  # of `KV_BITS`, "" or of 8 bits
    tile: HopperTile = HopperTile(128, 128)

    @property
    def fp8(self) -> bool:
        return self.dtype in FP8_DTYPES

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer and of a math thread: together what the CTA was launched with."""
        if self.tile.helpers > 3:
            return (32, 224) if self.tile.q_registers else (40, 216)
        if self.tile.math_groups == 3:
            return (56, 152) if self.kv == "gathered" else (32, 160)
        return (24, 240) if self.kv == "dense" and not self.kv_dtype and not self.fp8 else (40, 232)

    def program(self, arch: str) -> Program:
        from cute_attn.kernels.fa3 import Fa3Program
        from cute_attn.kernels.fa3_fp8 import Fp8Program
        from cute_attn.kernels.fa3_widened import WidenedProgram

        return (Fp8Program if self.fp8 else WidenedProgram if self.kv_dtype else Fa3Program)(self, arch)


@dataclass(frozen=True)
class CombineSpec(KernelSpec):
    """Merges the fp32 partials of a launch that cut the keys."""

    kernel: ClassVar[str] = "combine"
    needs_mma: ClassVar[bool] = False
    max_splits: ClassVar[int] = 128  # a lane of the merging warp holds the weights of 4 splits
    out_dtype: str
    head_dim_vo: int
    schedule: str = "grid"  # of the launch that left the partials

    def program(self, arch: str) -> Program:
        from cute_attn.kernels.combine import CombineProgram

        return CombineProgram(self, arch)


def _spec_types() -> dict[str, type[KernelSpec]]:
    from cute_attn.kernels.xqa.spec import XqaSpec

    return {cls.kernel: cls for cls in (Fa2Spec, Fa3Spec, CombineSpec, XqaSpec)}


def from_dict(data: dict[str, Any]) -> KernelSpec:
    """Inverse of `KernelSpec.asdict` (after a trip through JSON)."""
    fields = dict(data)
    cls = _spec_types()[fields.pop("kernel")]
    if "tile" in fields:
        fields["tile"] = (HopperTile if cls is Fa3Spec else Tile)(**fields["tile"])
    if isinstance(fields.get("scores"), Sequence):
        fields["scores"] = tuple(fields["scores"])
    return cls(**fields)
