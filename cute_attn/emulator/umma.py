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

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_RESULTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
PACKED4 = ("mxf4", "mxf4nvf4")
_ITEM_BYTES = {"f16": 2, "tf32": 4}


@dataclass(frozen=True)
class Kind:
    """Properties given by the opcode. `vector`: items that share a scale factor, 0 without scales. `stationary`: .ws,
    whose weights B may stay in a collector buffer."""

    name: str
    group: int
    vector: int = 0
    stationary: bool = False

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES.get(self.name, 1)

    @property
    def k(self) -> int:
        return 64 if self.name in PACKED4 else K_BYTES // self.item_bytes


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
    saturate: bool = False
    scale_type: str = ""
    a_scale_id: int = 0
    b_scale_id: int = 0
    stationary: bool = False


@functools.lru_cache(256)
def decode(word: int, kind: Kind) -> Instruction:
    """Decode an instruction descriptor. PtxError names an illegal field."""

    def bits(low: int, count: int) -> int:
        return word >> low & ((1 << count) - 1)

    def refuse(reason: str) -> PtxError:
        return PtxError(
            f"instruction descriptor {word:#010x} of .kind::{kind.name}, .cta_group::{kind.group}: {reason}"
        )

    scaled = kind.name in BLOCK_SCALED
    reserved = {6: 1, 24: 3, 31: 1, 0: 2, 3: 1} if scaled else {0: 2, 6: 1, 23: 1, 29: 1 if kind.stationary else 3}
    if bits(2, 1):
        raise refuse("sparse matrices are not supported")
    for low, count in reserved.items():
        if bits(low, count):
            raise refuse(f"bits {low}..{low + count - 1} must be 0")
    types = _TYPES[kind.name]
    results = {bits(4, 2): "f32"} if scaled else _RESULTS[kind.name]
    for name, code, table in (("A", bits(7, 3), types), ("B", bits(10, 3), types), ("D", bits(4, 2), results)):
        if code not in table:
            raise refuse(f"the type of {name} is {code}")
    found = Instruction(
        m=bits(27, 2) << 7 if scaled else bits(24, 5) << 4,
        n=bits(17, 6) << 3,
        a_type=types[bits(7, 3)],
        b_type=types[bits(10, 3)],
        d_type=results[bits(4, 2)],
        a_negated=bool(bits(13, 1)),
        b_negated=bool(bits(14, 1)),
        a_mn_major=bool(bits(15, 1)),
        b_mn_major=bool(bits(16, 1)),
        saturate=not scaled and bool(bits(3, 1)),
        scale_type=("ue4m3", "ue8m0")[bits(23, 1)] if scaled else "",
        a_scale_id=bits(29, 2) if scaled else 0,
        b_scale_id=bits(4, 2) if scaled else 0,
        stationary=kind.stationary,
    )
    reason = _wrong(found, kind)
    if reason:
        raise refuse(reason)
    return found


def _wrong(x: Instruction, kind: Kind) -> str:
    sizes: dict[int, tuple[int, ...]] = {1: (128,) if kind.vector else (64, 128), 2: (128, 256)}
    step = 8 * kind.group
    if kind.name == "i8" and (x.n > 32 or kind.group == 2):
        step = 16 * kind.group
    if x.b_mn_major and kind.item_bytes == 1:
        step = max(step, 16 * kind.group)
    if kind.stationary:
        sizes[1] = (32, 64, 128)
        if x.n not in (64, 128, 256):
            return f"N={x.n}, a .ws product takes 64, 128 and 256"
    sub_byte = {t for t in (x.a_type, x.b_type) if t in ("e2m3", "e3m2", "e2m1")}
    if x.m not in sizes[kind.group]:
        return f"M={x.m}, accepted are {sizes[kind.group]}"
    if not x.n or x.n > 256 or x.n % step:
        return f"N={x.n}, a multiple of {step} up to 256 is accepted"
    if kind.name == "f16" and x.d_type == "f16" and (x.a_type, x.b_type) != ("f16", "f16"):
        return f"D of f16 with {x.a_type} and {x.b_type}"
    if (x.a_mn_major and x.a_type in sub_byte) or (x.b_mn_major and x.b_type in sub_byte):
        return "types of less than 8 bits are K-major"
    if kind.name == "i8" and (x.a_negated or x.b_negated):
        return "integers cannot be negated"
    if x.saturate and kind.name != "i8":
        return "only integers saturate"
    if kind.vector:
        return _wrong_scales(x, kind)
    return ""


def _wrong_scales(x: Instruction, kind: Kind) -> str:
    count = kind.k // kind.vector  # scale factors of a row
    ids = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[count]
    if x.a_scale_id not in ids or x.b_scale_id not in ids:
        return f"scale factor ids {x.a_scale_id} and {x.b_scale_id}, accepted are {ids}"
    if x.scale_type == "ue4m3" and (kind.name, kind.vector) != ("mxf4nvf4", 16):
        return f"scales of type ue4m3, one for {kind.vector} items"
    return ""


# --- where D lies -----------------------------------------------------------------------------------------------------


def rows_of(x: Instruction, group: int) -> int:
    """Number of rows of A and D in one CTA."""
    return x.m // group


def lanes_of(x: Instruction, group: int, lane: int) -> Array:
    """Lanes of D in the order of the rows of `fold`. A single CTA with 64 rows uses half the lanes of each warp, unless
    the weights are stationary."""
    if rows_of(x, group) == 64 and group == 1 and not x.stationary:
        if lane not in (0, 16):
            raise PtxError(f"a product with M=64 at lane {lane} of tensor memory, accepted are 0 and 16")
        m = np.arange(64)
        return lane + m % 16 + 32 * (m // 16)
    if lane != 0:
        raise PtxError(f"a product with M={x.m} at lane {lane} of tensor memory, accepted is 0")
    return np.arange(128)


def fold(d: Array, x: Instruction, group: int) -> Array:
    """Arrange D of one CTA [rows, n] as in tensor memory: with 64 rows per CTA of a pair, the right half is below the
    left. With stationary weights all lanes are used: 64 rows lie so too, 32 rows in quarters of the columns."""
    if x.stationary:
        return np.concatenate(np.split(d, 128 // x.m, axis=1))
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
    if x.stationary and x.m != 128:
        raise PtxError(f"a .ws product with M={x.m} and A in tensor memory is not supported")


# --- values -----------------------------------------------------------------------------------------------------------


def values(raw: Array, kind: Kind, type_: str) -> Array:
    """Decode items of 32-byte rows, [rows, items], to float32 [rows, k]."""
    if type_ == "f16":
        return raw.view(np.float16).astype(np.float32)
    if type_ == "bf16":
        return floats.bf16_to_f32(raw)
    if type_ == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if type_ == "u8":
        return raw.astype(np.float32)
    if type_ == "s8":
        return raw.view(np.int8).astype(np.float32)
    if kind.name in PACKED4:
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
    elif type_ == "e2m1":
        codes = unpadded(raw, 4)
    elif type_ in ("e2m3", "e3m2"):
        codes = unpadded(raw, 6)
    else:
        codes = raw
    return formats.decode(codes, type_)


def contained(raw: Array, kind: Kind, type_: str) -> Array:
    """Decode items from tensor memory, where those of 4 or 6 bits have a byte each: e2m1 in bits 2 to 5, the others in
    bits 0 to 5. The ISA shows that in figures only."""
    if kind.name in PACKED4 or type_ not in ("e2m1", "e2m3", "e3m2"):
        return values(raw, kind, type_)
    return formats.decode(raw >> 2 & 15 if type_ == "e2m1" else raw & 63, type_)


def unpadded(raw: Array, width: int) -> Array:
    """Extract 16 items of `width` bits from the start of every 16 bytes."""
    units = np.ascontiguousarray(raw).reshape(len(raw), -1, 16)[..., : 2 * width]
    bits = np.unpackbits(units, axis=-1, bitorder="little").reshape(len(raw), -1, width)
    codes: Array = (bits.astype(np.int64) << np.arange(width)).sum(axis=-1)
    return codes


def accumulate(product: Array, before: Array | None, x: Instruction, shift: int) -> Array:
    """Words of D after accumulation onto the words `before`, if any."""
    if x.d_type == "s32":
        total = product.astype(np.int64)
        if before is not None:
            total = total + before.view(np.int32)
        if x.saturate:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return total.astype(np.int32).view(np.uint32)
    if before is not None:
        old = _half_words(before) if x.d_type == "f16" else before.view(np.float32)
        product = product + old * np.float32(2.0**-shift)
    if x.d_type == "f16":
        return product.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(product, np.float32).view(np.uint32)


def _half_words(words: Array) -> Array:
    return (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)


# --- scale factors ----------------------------------------------------------------------------------------------------


def scale_columns(rows: int) -> int:
    """Number of tensor memory columns for the scales of `rows` rows: 32 rows per column, one word per row."""
    return -(-rows // 32)


def scales(words: Array, rows: int, first: int, count: int, type_: str) -> Array:
    """Decode words [32, columns] of one quarter of the lanes to factors [rows, count], from byte `first` on."""
    codes = np.ascontiguousarray(words.T).reshape(-1)[:rows, None].view(np.uint8)[:, first : first + count]
    return formats.decode(codes & 0x7F, "e4m3") if type_ == "ue4m3" else formats.decode_scale(codes)
