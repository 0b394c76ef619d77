"""mma.sync of 16-bit and 8-bit floats: fragments to matrices, one product for all warps of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.formats import DECODERS, Decode
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.warp_batch import WarpBatch


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


_MMA: dict[str, Any] = {"operands": "$1 {u4} {u4} {f4}", "results": "{f4}", "aligned": "mma.sync"}
EIGHT_BITS = "{.e4m3.e4m3|.e4m3.e5m2|.e5m2.e4m3|.e5m2.e5m2}"


@called("mma.sync.aligned.m16n8{k16|k8}.row.col.f32{.f16.f16|.bf16.bf16}.f32", **_MMA)
@called(f"mma.sync.aligned.m16n8{{k32|k16}}.row.col.f32{EIGHT_BITS}.f32", since=89, **_MMA)
def mma(
    w: WarpBatch,
    mask: Array | None,
    kinds: str,
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    c: tuple[Array, ...],
) -> Array:
    a_decode, b_decode = (DECODERS[kind] for kind in kinds[1:].split("."))
    return _multiply_add(w, a_matrix(w, a, a_decode), _b_matrix(w, b, b_decode), _stack(w, c))


def _multiply_add(w: WarpBatch, a: Array, b: Array, c: Array) -> Array:
    """Add products of [warps, 16, k] and [warps, 8, k] to accumulators [4, lanes]."""
    # In fp64: the order in which a BLAS adds depends on a row's place in the tile, the bits of a GPU's sums do not.
    product = np.matmul(a.astype("f8"), b.astype("f8").transpose(0, 2, 1)).astype("f4")  # [warps, 16, 8]
    fragments = product.reshape(len(w.warps), 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, w.size)
    return fragments + c


@called("movmatrix.sync.aligned.m8n8.trans.b16", operands="u4", results="u4", aligned="movmatrix")
def movmatrix(w: WarpBatch, mask: Array | None, a: Array) -> Array:
    """Transpose: lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, before and after."""
    rows = np.ascontiguousarray(w.full(a)).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
