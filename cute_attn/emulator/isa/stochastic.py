"""cvt.rs: stochastic rounding with random bits from a register.

The ISA says which random bits belong to which operand and that a result is rounded away from zero where they and the
discarded bits of the mantissa carry. It does not say how 16 (or 8) random bits lie beside more discarded ones: assumed
is that the most significant ones are added to each other, of subnormal results too. Assumed also: operands that share
their random bits (a and b, e and f of 8- and 6-bit formats) use the same ones, and numbers from the first that the
format does not reach on become infinite, unless saturated.
"""

from __future__ import annotations

import numpy as np

from cute_attn.emulator import formats
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst

_ARCHS = (100, 103)


@form(
    "cvt.rs{|.relu|.satfinite|.relu.satfinite|.satfinite.relu}{.f16x2|.bf16x2}.f32",
    since=100,
    only=_ARCHS,
    conformance="unverified",
)
def to_pair(e: Emitter, inst: Inst, options: str, to: str) -> None:
    """Convert a pair; operand a goes to the upper half and has the upper half of the random bits."""
    d, a, b, random = inst.operands
    items = [e.get(x, "f4") for x in (b, a)]
    flags = f"{'.relu' in options}, {'.satfinite' in options}"
    e.set(d, "u4", f"{e.bind(_pair, 'stochastic')}({', '.join(items)}, {e.get(random, 'u4')}, {to!r}, {flags})")


def _pair(low: Array, high: Array, random: Array, to: str, relu: bool, finite: bool) -> Array:
    convert, largest = {
        ".f16x2": (floats.f32_to_f16_stochastic, 0x7BFF),
        ".bf16x2": (floats.f32_to_bf16_stochastic, 0x7F7F),
    }[to]
    codes = []
    for x, bits in ((low, random), (high, random >> np.uint32(16))):
        code = convert(*np.broadcast_arrays(x, bits))
        size, sign = code & np.uint16(0x7FFF), code & np.uint16(0x8000)
        if finite:
            size = np.where(np.isnan(x), size, np.minimum(size, np.uint16(largest)))
        code = size | sign
        codes.append(np.where(sign != 0, np.uint16(0), code) if relu else code)
    return floats.pack16(codes[0].astype(np.uint16), codes[1].astype(np.uint16))


@form(
    "cvt.rs{.satfinite|.relu.satfinite|.satfinite.relu}{.e4m3x4|.e5m2x4|.e2m3x4|.e3m2x4|.e2m1x4}.f32",
    since=100,
    only=_ARCHS,
    conformance="unverified",
)
def to_four(e: Emitter, inst: Inst, options: str, to: str) -> None:
    """Convert {a, b, e, f}, from the most significant code to the least."""
    d, sources, random = inst.operands
    if len(e.items(sources)) != 4:
        raise PtxError(f"{inst.op} needs four sources")
    items = "(" + ", ".join(e.get(x, "f4") for x in e.items(sources)) + ")"
    narrow = to == ".e2m1x4"
    function = e.bind(_four_fp4 if narrow else _four, "stochastic")
    text = f"{function}({items}, {e.get(random, 'u4')}, {to[1:5]!r}, {'.relu' in options})"
    e.set(d, "u2" if narrow else "u4", text)


def _four(sources: tuple[Array, ...], random: Array, kind: str, relu: bool) -> Array:
    """a and b take the upper 16 random bits, e and f the lower ones."""
    shares = [(random >> np.uint32(shift)) & np.uint32(0xFFFF) for shift in (16, 16, 0, 0)]
    found: Array = _joined(sources, shares, kind, relu, 16, 8).astype(np.uint32)
    return found


def _four_fp4(sources: tuple[Array, ...], random: Array, kind: str, relu: bool) -> Array:
    """a and b take the upper byte of each half of the random bits, e and f the lower one."""
    shares = [(random >> np.uint32(shift)) & np.uint32(0xFF) for shift in (24, 8, 16, 0)]
    found: Array = _joined(sources, shares, kind, relu, 8, 4).astype(np.uint16)
    return found


def _joined(sources: tuple[Array, ...], shares: list[Array], kind: str, relu: bool, bits: int, width: int) -> Array:
    total = np.zeros(1, np.uint32)
    for x, share in zip(sources, shares, strict=True):
        code = formats.encode_stochastic(x, kind, relu, share, bits).astype(np.uint32)
        total = total << np.uint32(width) | code
    return total
