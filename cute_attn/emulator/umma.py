"""tcgen05 matrix products: instruction descriptors, and layouts of matrices in tensor memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cute_attn.emulator import formats
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa import floats

K_BYTES = 32  # of a row of A or B in shared memory, whatever the type
A_COLUMNS = 8  # of A in tensor memory

_TYPES = {"f16": {0: "f16", 1: "bf16"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}
_RESULTS = {0: "f16", 1: "f32"}


@dataclass(frozen=True)
class Kind:
    """Properties given by the opcode."""

    name: str
    group: int

    @property
    def item_bytes(self) -> int:
        return 2 if self.name == "f16" else 1


@dataclass(frozen=True)
class Instruction:
    """Decoded instruction descriptor of D[m, n] += A[m, k] B[n, k]."""

    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_negated: bool
    b_negated: bool
    a_mn_major: bool
    b_mn_major: bool


@functools.lru_cache(256)
def decode(word: int, kind: Kind) -> Instruction:
    """Decode an instruction descriptor. PtxError names an illegal field."""

    def bits(low: int, count: int) -> int:
        return word >> low & ((1 << count) - 1)

    def refuse(reason: str) -> PtxError:
        return PtxError(
            f"instruction descriptor {word:#010x} of .kind::{kind.name}, .cta_group::{kind.group}: {reason}"
        )

    if bits(2, 1):
        raise refuse("sparse matrices are not supported")
    if bits(3, 1):
        raise refuse("only integers saturate")
    for low, count in {0: 2, 6: 1, 23: 1, 29: 3}.items():
        if bits(low, count):
            raise refuse(f"bits {low}..{low + count - 1} must be 0")
    types = _TYPES[kind.name]
    for name, code, table in (("A", bits(7, 3), types), ("B", bits(10, 3), types), ("D", bits(4, 2), _RESULTS)):
        if code not in table:
            raise refuse(f"the type of {name} is {code}")
    found = Instruction(
        m=bits(24, 5) << 4,
        n=bits(17, 6) << 3,
        a_type=types[bits(7, 3)],
        b_type=types[bits(10, 3)],
        d_type=_RESULTS[bits(4, 2)],
        a_negated=bool(bits(13, 1)),
        b_negated=bool(bits(14, 1)),
        a_mn_major=bool(bits(15, 1)),
        b_mn_major=bool(bits(16, 1)),
    )
    reason = _wrong(found, kind)
    if reason:
        raise refuse(reason)
    return found


def _wrong(x: Instruction, kind: Kind) -> str:
    sizes = {1: (64, 128), 2: (128, 256)}
    step = (16 if x.b_mn_major and kind.item_bytes == 1 else 8) * kind.group
    if x.m not in sizes[kind.group]:
        return f"M={x.m}, accepted are {sizes[kind.group]}"
    if not x.n or x.n > 256 or x.n % step:
        return f"N={x.n}, a multiple of {step} up to 256 is accepted"
    if kind.name == "f16" and x.d_type == "f16" and (x.a_type, x.b_type) != ("f16", "f16"):
        return f"D of f16 with {x.a_type} and {x.b_type}"
    return ""


# --- where D lies -----------------------------------------------------------------------------------------------------


def rows_of(x: Instruction, group: int) -> int:
    """Number of rows of A and D in one CTA."""
    return x.m // group


def lanes_of(x: Instruction, group: int, lane: int) -> Array:
    """Lanes of D in the order of the rows of `fold`. A single CTA with 64 rows uses half the lanes of each warp."""
    if rows_of(x, group) == 64 and group == 1:
        if lane not in (0, 16):
            raise PtxError(f"a product with M=64 at lane {lane} of tensor memory, accepted are 0 and 16")
        m = np.arange(64)
        return lane + m % 16 + 32 * (m // 16)
    if lane != 0:
        raise PtxError(f"a product with M={x.m} at lane {lane} of tensor memory, accepted is 0")
    return np.arange(128)


def fold(d: Array, x: Instruction, group: int) -> Array:
    """Arrange D of one CTA [rows, n] as in tensor memory: with 64 rows per CTA of a pair, the right half is below the
    left."""
    if rows_of(x, group) == 64 and group == 2:
        return np.concatenate([d[:, : x.n // 2], d[:, x.n // 2 :]])
    return d


def check_tensor_memory(x: Instruction, kind: Kind, d: int, a: int | None) -> None:
    """Check the addresses of D and, if it lies in tensor memory, of A. Their alignment is what a GB300 traps on
    (measured by others), not a rule of the ISA; that of N is CUTLASS's."""
    if d % 2:
        raise PtxError(f"D at column {d & 0xFFFF} of tensor memory, a multiple of 2 is accepted")
    if a is None:
        return
    if a % 4:
        raise PtxError(f"A at column {a & 0xFFFF} of tensor memory, a multiple of 4 is accepted")
    if kind.group == 2 and x.n % 32:
        raise PtxError(f"N={x.n} with A in the tensor memory of two CTAs, a multiple of 32 is accepted")


# --- values -----------------------------------------------------------------------------------------------------------


def values(raw: Array, type_: str) -> Array:
    """Decode items of 32-byte rows, [rows, items], to float32."""
    if type_ == "f16":
        return raw.view(np.float16).astype(np.float32)
    if type_ == "bf16":
        return floats.bf16_to_f32(raw)
    return formats.decode(raw, type_)


def accumulate(product: Array, before: Array | None, x: Instruction) -> Array:
    """Words of D after accumulation onto the words `before`, if any."""
    if before is not None:
        product = product + (_half_words(before) if x.d_type == "f16" else before.view(np.float32))
    if x.d_type == "f16":
        return product.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(product, np.float32).view(np.uint32)


def _half_words(words: Array) -> Array:
    return (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
