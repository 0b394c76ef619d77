"""mov, logic, shifts and bit counting."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator.dtypes import WIDTH, Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import called, computed, form
from cute_attn.emulator.ptx import Imm, Inst, Reg, Sym, Vec
from cute_attn.emulator.warp_batch import WarpBatch


@form("mov.b128", since=70)
@form("mov{.b16|.u16|.s16|.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64|.pred}")
def mov(e: Emitter, inst: Inst, kind: str = ".b128") -> None:
    d, a = inst.operands
    t = tag(kind)
    whole = t if t == "v16" else f"u{WIDTH[t]}"
    if isinstance(d, Vec):
        pieces = len(d.items)
        part = f"u{WIDTH[t] // pieces}"
        e.line(f"t = np.ascontiguousarray({e.get(a, whole)}).view({part})")
        for i, item in enumerate(d.items):
            if not (isinstance(item, Sym) and item.name == "_"):
                e.set(item, part, f"t[{i}::{pieces}]")
    elif isinstance(a, Vec):
        parts = (e.get(item, f"u{WIDTH[t] // len(a.items)}") for item in a.items)
        e.set(d, whole, f"{e.bind(floats.interleaved, 'pack')}({', '.join(parts)}).view({whole})")
    else:
        t = e.homes[d.index] if isinstance(d, Reg) and kind != ".pred" and not isinstance(a, Sym) else t
        e.set(d, t, e.get(a, t))


_LOGIC = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}"}
computed({f"{op}{{.b16|.b32|.b64}}": pattern for op, pattern in _LOGIC.items()})
computed({f"{op}.pred": pattern for op, pattern in _LOGIC.items()})


@form("{shl}{.b16|.b32|.b64}", "{shr}{.b16|.u16|.s16|.b32|.u32|.s32|.b64|.u64|.s64}")
def shift(e: Emitter, inst: Inst, op: str, kind: str) -> None:
    """Shift; a count of the register's width or more shifts everything out."""
    d, a, count = inst.operands
    t = tag(kind)
    if isinstance(count, Imm) and 0 <= count.value < 8 * WIDTH[t]:
        e.set(d, t, f"{e.get(a, t)} {'<<' if op == 'shl' else '>>'} {e.constant(count.value, t)}")
    else:
        e.compute(inst, _shift_left if op == "shl" else _shift_right, ". u4")


def _shift_left(x: Array, count: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    return np.where(count < bits, x << np.minimum(count, bits - 1).astype(x.dtype), x.dtype.type(0))


def _shift_right(x: Array, count: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    shifted: Array = x >> np.minimum(count, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(count < bits, shifted, x.dtype.type(0))


@called("shf{.l|.r}{.wrap|.clamp}.b32", operands="$0 $1 . . .", results=".")
def funnel(w: WarpBatch, mask: Array | None, side: str, mode: str, low: Array, high: Array, count: Array) -> Array:
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    n = (count & np.uint32(31) if mode == ".wrap" else np.minimum(count, np.uint32(32))).astype(np.uint64)
    shifted = (both << n) >> np.uint64(32) if side == ".l" else both >> n
    return shifted.astype(np.uint32)


@called("lop3.b32", operands=". . . #", results=".")
def lop3(w: WarpBatch, mask: Array | None, a: Array, b: Array, c: Array, table: int) -> Array:
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    constant = int(selector[0]) if len(selector) == 1 else 0x8888
    if not constant & 0x8888:  # the same bytes in all lanes, none by its sign
        chosen = [constant >> 4 * i & 7 for i in range(4)]
        packed: Array = np.ascontiguousarray(floats.interleaved(a, b).view(np.uint8).reshape(-1, 8)[:, chosen])
        return packed.view(np.uint32)[:, 0]
    a, b, selector = np.broadcast_arrays(a, b, selector)
    pool = floats.interleaved(a, b).view(np.uint8).reshape(-1, 8)
    result = np.zeros(len(a), np.uint32)
    rows = np.arange(len(a))
    for i in range(4):
        choice = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = pool[rows, choice & 7]
        byte = np.where(choice & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


# frexp tells the number of bits of what a double holds exactly; of 0 it is 0.
computed(
    {
        "prmt.b32": _prmt,
        "clz.b32": "(32 - np.frexp({0}.astype(f8))[1]).astype(u4)",
        "popc.b32": "np.unpackbits({0}[:, None].view(u1), axis=1).sum(axis=1, dtype=u4)",
        "bfind.u32": "(np.frexp({0}.astype(f8))[1] - 1).astype(u4)",
    }
)
