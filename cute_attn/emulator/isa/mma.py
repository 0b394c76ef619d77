"""mma.sync of 16-bit and 8-bit floats: fragments to matrices, one product for all warps of the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_attn.emulator import formats
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import Divergence
from cute_attn.emulator.isa import floats
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Inst
from cute_attn.emulator.warp_batch import WarpBatch

Decode = Callable[[Array], Array]


def _f16(words: Array) -> Array:
    return words.view(np.float16).astype(np.float32)


def _bf16(words: Array) -> Array:
    return floats.bf16_to_f32(words.view(np.uint16))


def _e4m3(words: Array) -> Array:
    return formats.decode(words.view(np.uint8), "e4m3")


def _e5m2(words: Array) -> Array:
    return formats.decode(words.view(np.uint8), "e5m2")


DECODERS: dict[str, Decode] = {".f16": _f16, ".bf16": _bf16, ".e4m3": _e4m3, ".e5m2": _e5m2}


@form(
    "mma.sync.aligned.m16n8{k16|k8}.row.col.f32{.f16.f16|.bf16.bf16}.f32",
    converges=True,
    conformance="approx",
    golden="mma",
)
def mma_16bit(e: Emitter, inst: Inst, shape: str, kinds: str) -> None:
    kind = "." + kinds.split(".")[1]
    _emit(e, inst, DECODERS[kind], DECODERS[kind])


@form(
    "mma.sync.aligned.m16n8{k32|k16}.row.col.f32{.e4m3|.e5m2}{.e4m3|.e5m2}.f32",
    since=89,
    converges=True,
    conformance="approx",
    golden="mma",
)
def mma_8bit(e: Emitter, inst: Inst, shape: str, a: str, b: str) -> None:
    _emit(e, inst, DECODERS[a], DECODERS[b])


@form("mma.sync.aligned.m16n8{k16|k8}.row.col.f16.f16.f16.f16", converges=True, conformance="approx", golden="mma")
def mma_f16(e: Emitter, inst: Inst, shape: str) -> None:
    """Emit a product with fp16 accumulators: two words of pairs."""
    d, *sources = inst.operands
    e.call(_mma_f16, [e.values(x, "u4") for x in sources], [(x, "u4") for x in e.items(d)])


def _emit(e: Emitter, inst: Inst, a_decode: Decode, b_decode: Decode) -> None:
    d, a, b, c = inst.operands
    sources = [e.values(a, "u4"), e.values(b, "u4"), e.values(c, "f4")]
    e.call(_mma, [e.bind((a_decode, b_decode), "decode"), *sources], [(x, "f4") for x in e.items(d)])


def whole(w: WarpBatch, mask: Array | None, what: str) -> None:
    """Check that all 32 lanes of each participating warp are active."""
    if mask is None:
        return
    rows = mask.reshape(-1, 32)
    partial = rows.any(axis=1) & ~rows.all(axis=1)
    if some(partial):
        raise Divergence(f"{what} with lanes of warp {int(w.warps[partial.argmax()])} missing")


def a_matrix(w: WarpBatch, registers: tuple[Array, ...], decode: Decode) -> Array:
    """Assemble A fragments to [warps, 16, k]: register j holds rows +8 (j & 1) and the k half j >> 1."""
    words = _stack(w, registers)
    values = decode(words).reshape(len(registers) // 2, 2, len(w.warps), 8, 4, -1)
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(len(w.warps), 16, -1)


def _b_matrix(w: WarpBatch, registers: tuple[Array, ...], decode: Decode) -> Array:
    """Assemble B fragments to [warps, 8, k] (the transpose of B)."""
    values = decode(_stack(w, registers)).reshape(len(registers), len(w.warps), 8, 4, -1)
    return values.transpose(1, 2, 0, 3, 4).reshape(len(w.warps), 8, -1)


def _stack(w: WarpBatch, registers: tuple[Array, ...]) -> Array:
    return np.array([w.full(r) for r in registers])


def _mma(
    w: WarpBatch,
    mask: Array | None,
    how: tuple[Decode, Decode],
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    c: tuple[Array, ...],
) -> Array:
    whole(w, mask, "mma.sync")
    left, right = a_matrix(w, a, how[0]), _b_matrix(w, b, how[1])
    # In fp64: the order in which a BLAS adds depends on a row's place in the tile, the bits of a GPU's sums do not.
    product = np.matmul(left.astype("f8"), right.astype("f8").transpose(0, 2, 1)).astype("f4")  # [warps, 16, 8]
    warps = len(w.warps)
    fragments = product.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, w.size)
    total: Array = fragments + _stack(w, c)
    return total


def _mma_f16(
    w: WarpBatch, mask: Array | None, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...]
) -> list[Array]:
    wide = _f16(_stack(w, c)).reshape(2, w.size, 2)
    spread = (wide[0, :, 0], wide[0, :, 1], wide[1, :, 0], wide[1, :, 1])
    d = _mma(w, mask, (_f16, _f16), a, b, spread)
    return [floats.packed(d[i : i + 2].T, ".f16x2") for i in (0, 2)]


@called("movmatrix.sync.aligned.m8n8.trans.b16", kinds=("u4",), results=("u4",), converges=True, golden="matrix")
def movmatrix(w: WarpBatch, mask: Array | None, a: Array) -> Array:
    """Transpose: lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, before and after."""
    whole(w, mask, "movmatrix")
    rows = np.ascontiguousarray(w.full(a)).view(np.uint16).reshape(-1, 8, 8)
    found: Array = np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
    return found
