"""What one thread writes: some bytes as they are, or 16 elements as NVFP4 or fp8."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.append.memory import ITEMSIZE, Elements, load, store, store_words
from cute_attn.kernels.append.rounding import (
    E2M1,
    E4M3,
    FP8,
    Denominator,
    GlobalScale,
    Magnitudes,
    codes,
    conversion,
    denominator,
    global_scale,
    multiply,
    nearest,
    scaled,
)
from cute_attn.kernels.append.slots import Slot
from cute_attn.kernels.append.spec import BLOCK, COPY, NVFP4, VECTOR, AppendSpec
from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.rows import Divisor
from cute_attn.kernels.blocks.softmax import tree


class Rows(NamedTuple):
    """Rows [row, head, element]. Strides are bytes; `step`: from an element to the next, or of a copy from one access
    to the next.
    """

    address: Int64
    row: Int64
    head: Int64
    step: Int64

    def of(self, row: Int32, head: Int32) -> Int64:
        return ptx.mad_u32(head, self.head, ptx.mad_u32(row, self.row, self.address))


class Place(NamedTuple):
    """Heads' rows in a cache. Strides are bytes."""

    address: Int64
    page: Int64
    token: Int64
    head: Int64

    def of(self, slot: Slot, head: Int32) -> Int64:
        page = ptx.mad_u32(slot.page, self.page, self.address)
        return ptx.mad_u32(head, self.head, ptx.mad_u32(slot.offset, self.token, page))


class Scale(NamedTuple):
    """A scale, or its address if that is not 0."""

    number: Float32
    address: Int64


class Operand(NamedTuple):
    """Keys or values: where rows are, where they go, and their scale."""

    source: Rows
    cache: Place
    sf: Place  # block scales
    scale: Scale
    units: Divisor  # of a head's row, for each thread's first: half of them where a thread has two


@dataclass(frozen=True)
class Source:
    """A unit in memory, and what was loaded of it."""

    row: Int64
    unit: Int32
    loaded: list[Any]


class CopyUnit:
    """`access` bytes, copied."""

    def __init__(self, spec: AppendSpec) -> None:
        self.access = spec.access

    def load(self, operand: Operand, row: Int64, unit: Int32) -> list[Int32]:
        return load(ptx.mad_u32(unit, operand.source.step, row), self.access)

    def scale(self, operand: Operand) -> None:
        """Returns what `store` gets."""

    def store(self, operand: Operand, scale: GlobalScale | None, source: Source, slot: Slot, head: Int32) -> None:
        store(operand.cache.of(slot, head) + Int64(source.unit) * Int64(self.access), self.access, source.loaded)


class QuantisedUnit:
    """16 elements, quantised."""

    def __init__(self, spec: AppendSpec) -> None:
        self.dtype, self.vector = spec.dtype, spec.access == VECTOR

    def elements(self, operand: Operand, row: Int64, unit: Int32) -> Elements:
        step = Int64(ITEMSIZE[self.dtype]) if self.vector else operand.source.step
        return Elements(self.dtype, ptx.mad_u32(unit * Int32(BLOCK), step, row), step)

    def load(self, operand: Operand, row: Int64, unit: Int32) -> list[Float32]:
        return self.elements(operand, row, unit).block(self.vector)

    def scale(self, operand: Operand) -> GlobalScale:
        return global_scale(*operand.scale)

    def magnitudes(self, operand: Operand, source: Source, power: Float32) -> Magnitudes:
        """Returns what loads the magnitude of an element again, times `power`."""
        elements = self.elements(operand, source.row, source.unit)
        return lambda index: ptx.magnitude(multiply(elements.at(index), power))


class Nvfp4Unit(QuantisedUnit):
    """A block of NVFP4: 8 bytes of e2m1 and one scale."""

    def __init__(self, spec: AppendSpec, arch: str) -> None:
        super().__init__(spec)
        self.e2m1, self.e4m3 = conversion(E2M1, arch), conversion(E4M3, arch)

    def store(self, operand: Operand, scale: Any, source: Source, slot: Slot, head: Int32) -> None:
        largest = max_magnitude(source.loaded)
        values = scaled(replaced_nan(source.loaded, largest, 0), scale.power)
        largest = multiply(largest, scale.power)
        scale_code = nearest(self.e4m3, largest, denominator(Float32(E2M1.largest), scale.value))
        by = denominator(E4M3.value(scale_code), scale.value)
        by = Denominator(by.few, by.scale, ptx.select(scale_code == 0, Float32(0.0), by.reciprocal))
        words = codes(self.e2m1, values, self.magnitudes(operand, source, scale.power), by)
        store_words(operand.cache.of(slot, head) + Int64(source.unit) * Int64(BLOCK // 2), words, self.vector)
        store(operand.sf.of(slot, head) + Int64(source.unit), 1, [scale_code])


class Fp8Unit(QuantisedUnit):
    """16 numbers of fp8."""

    def __init__(self, spec: AppendSpec, arch: str) -> None:
        super().__init__(spec)
        self.fp8 = conversion(FP8[spec.stored], arch)

    def store(self, operand: Operand, scale: Any, source: Source, slot: Slot, head: Int32) -> None:
        values = scaled(replaced_nan(source.loaded, max_magnitude(source.loaded), 0x7F800000), scale.power)
        by = denominator(Float32(1.0), scale.value)
        words = codes(self.fp8, values, self.magnitudes(operand, source, scale.power), by)
        store_words(operand.cache.of(slot, head) + Int64(source.unit) * Int64(BLOCK), words, self.vector)


def unit_of(spec: AppendSpec, arch: str) -> CopyUnit | Nvfp4Unit | Fp8Unit:
    """Returns what a thread of this kernel writes."""
    if spec.stored == COPY:
        return CopyUnit(spec)
    return Nvfp4Unit(spec, arch) if spec.stored == NVFP4 else Fp8Unit(spec, arch)


def max_magnitude(values: list[Float32]) -> Float32:
    """Returns the largest magnitude, NaN if any value is."""
    return tree(ptx.fmax_nan, [ptx.magnitude(x) for x in values])


@cute.jit
def replaced_nan(values: list[Float32], largest: Float32, magnitude: cutlass.Constexpr) -> list[Float32]:
    """Replaces NaN by a number with these bits and NaN's sign: what the reference makes of it."""
    if largest != largest:
        values = [_replaced(x, magnitude) for x in values]
    return values


def _replaced(x: Float32, magnitude: int) -> Float32:
    is_nan: Boolean = x != x
    signed = (ptx.bits(x) & Int32(-(1 << 31))) | Int32(magnitude)
    return ptx.select(is_nan, ptx.from_bits(signed), x)
