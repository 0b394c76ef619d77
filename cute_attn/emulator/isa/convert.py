"""cvt, cvta: between integers, floats, packed 16-bit, fp8 and fp4 formats."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator import formats
from cute_attn.emulator.dtypes import DTYPES, Array, tag
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import called, computed
from cute_attn.emulator.memory import GENERIC_SHARED
from cute_attn.emulator.warp_batch import WarpBatch

_INTS = "{.u8|.s8|.u16|.s16|.u32|.s32|.u64|.s64}"
_ROUND = {".rni": "rint", ".rzi": "trunc", ".rmi": "floor", ".rpi": "ceil"}


_CASTS = f"cvt{_INTS}{_INTS}", f"cvt.rn{{.f32|.f64|.f16}}{_INTS}", "cvt.rn.f32.f64", "cvt.f64.f32", "cvt{|.ftz}.f32.f16"
computed(
    dict.fromkeys(_CASTS, "{0}.astype({to})")  # as numpy does: with the low bits of an integer, to nearest
    | {f"cvt{mode}{{.f32.f32|.f64.f64}}": f"np.{function}({{0}})" for mode, function in _ROUND.items()}
    | {"cvt.rn.f16.f32": floats.f32_to_f16, "cvt.rn.bf16.f32": floats.f32_to_bf16}
    | {"cvt{|.ftz}.f32.bf16": floats.bf16_to_f32},
    kinds={"results": "^"},
)


@called(f"cvt{{.rni|.rzi|.rmi|.rpi}}{_INTS}{{.f32|.f64|.f16}}", operands="$0 $1 .", results="^")
def to_integer(w: WarpBatch, mask: Array | None, mode: str, to: str, x: Array) -> Array:
    """Convert with saturation, as hardware does; NaN gives 0, or only the top bit for 64-bit targets."""
    want = DTYPES[tag(to)]
    limits = np.iinfo(want)
    wide = getattr(np, _ROUND[mode])(x).astype(np.float64)
    found = np.where(np.isnan(wide), 0, np.clip(wide, float(limits.min), float(limits.max)))
    top = found >= float(limits.max)
    result = np.where(top, np.array(limits.max, want), np.where(top, 0, found).astype(want))
    nan = np.array(1 << 63, np.uint64).astype(want) if want.itemsize == 8 else np.array(0, want)
    return np.where(np.isnan(wide), nan, result)


@called("cvt.rn{.f16x2|.bf16x2}.f32", operands="$0 f4 f4", results="u4")
def narrow_pair(w: WarpBatch, mask: Array | None, to: str, high: Array, low: Array) -> Array:
    """Convert a pair; operand a goes to the upper half."""
    return floats.packed(floats.interleaved(low, high), to)


_TO_FP8: dict[str, Any] = {"results": "u2", "since": 89}


@called("cvt.rn.satfinite{.e4m3x2|.e5m2x2}.f32", operands="$0 f4 f4", **_TO_FP8)
def to_fp8(w: WarpBatch, mask: Array | None, to: str, high: Array, low: Array) -> Array:
    """Convert a pair; operand a goes to the upper byte."""
    return formats.encode(floats.interleaved(low, high), to[1:5]).view(np.uint16)


@called("cvt.rn.satfinite{.e4m3x2|.e5m2x2}.f16x2", operands="$0 u4", **_TO_FP8)
def halves_to_fp8(w: WarpBatch, mask: Array | None, to: str, pairs: Array) -> Array:
    return formats.encode(floats.halves(pairs, ".f16x2").ravel(), to[1:5]).view(np.uint16)


@called("cvt.rn.satfinite.e2m1x2.f32", operands="f4 f4", results="u1", since=100)
def to_fp4(w: WarpBatch, mask: Array | None, high: Array, low: Array) -> Array:
    """Convert a pair; operand a goes to the upper four bits."""
    return formats.encode(low, "e2m1") | (formats.encode(high, "e2m1") << np.uint8(4))


@called("cvt.rn{.f16x2}{.e4m3x2|.e5m2x2}", operands="$0 $1 u2", results="u4", since=89)
@called("cvt.rn{.bf16x2}{.e4m3x2|.e5m2x2}", operands="$0 $1 u2", results="u4", since=100)
@called("cvt.rn{.f16x2|.bf16x2}{.e2m1x2}", operands="$0 $1 u1", results="u4", since=100)
def from_small(w: WarpBatch, mask: Array | None, to: str, source: str, x: Array) -> Array:
    kind = source[1:5]
    codes = np.stack([x & 15, x >> np.uint8(4)], axis=1) if kind == "e2m1" else np.ascontiguousarray(x).view(np.uint8)
    return floats.packed(formats.decode(codes, kind), to)


computed(
    {
        "cvta{|.to}{.global|.param|.const}.u64": "{0}",  # these spaces have generic addresses
        "cvta.shared{|::cta|::cluster}.u64": f"{{0}} | u8.type({GENERIC_SHARED})",
        "cvta.to.shared{|::cta|::cluster}.u64": "{0} & u8.type(0xFFFFFFFF)",
    }
)
