"""ld and st of the parameter, shared, shared::cluster and global spaces."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Addr, Inst, Sym
from cute_attn.emulator.warp_batch import WarpBatch

_TYPES = "{.b8|.u8|.s8|.b16|.u16|.s16|.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64}"
_NARROW = ".b8|.u8|.s8|.b16|.u16|.s16|.b32|.u32|.s32|.f32"
_PAIRS = f"{_TYPES[1:-1]}|.v2" + "|.v2".join(_TYPES[1:-1].split("|"))
_SIZES = "{" + _PAIRS + "|.v4" + "|.v4".join(_NARROW.split("|")) + "}"  # up to 128 bits
_SHARED = f".shared{{|::cta|::cluster}}{_SIZES}"


@form(f"ld.param{{|.v2|.v4}}{_TYPES}")
def ld_param(e: Emitter, inst: Inst, vec: str, kind: str) -> None:
    d, source = inst.operands
    if not isinstance(source, Addr) or not isinstance(source.base, Sym):
        raise PtxError("ld.param needs a parameter's name")
    t = tag(kind)
    number = e.params[source.base.name]
    for i, item in enumerate(e.items(d)):
        e.set(item, t, f"w.cta.grid.param({number}, {source.offset + i * int(t[1])}, {t})")


# --- loads ------------------------------------------------------------------------------------------------------------


@called(f"ld{_SHARED}", operands="$type $items [u4] $0", results="{.}")
def ld_shared(w: WarpBatch, mask: Array | None, word: Any, count: int, address: Array, space: str) -> list[Array]:
    rows = access.load_shared(w, mask, address, word.itemsize * count, "ld.shared", space == "::cluster")
    return _columns(rows, word)


@called(f"ld{{|.relaxed.gpu}}.global{{|.ca|.cg|.cs}}{_SIZES}", operands="$0 $type $items [u8]", results="{.}")
def ld_global(w: WarpBatch, mask: Array | None, sem: str, word: Any, count: int, address: Array) -> list[Array]:
    """Load words. Relaxed loads do not race, and order nothing."""
    rows = access.load_global(w, mask, address, word.itemsize * count, "ld.global", strong=sem != "")
    return _columns(rows, word)


def _columns(rows: Array, word: Any) -> list[Array]:
    words = rows.view(word)
    return [words[:, i] for i in range(words.shape[1])]


# --- stores -----------------------------------------------------------------------------------------------------------


@called(f"st{_SHARED}", operands="[u4] {.} $0")
def st_shared(w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...], space: str) -> None:
    access.store_shared(w, mask, address, _rows(w, sources), "st.shared", space == "::cluster")


@called("st.global.v8{.b32|.f32}", operands="[u8] {.}", since=100)  # at multiples of 32
@called(f"st.global{{|.cg|.cs}}{_SIZES}", operands="[u8] {.}")
def st_global(w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...]) -> None:
    access.store_global(w, mask, address, _rows(w, sources), "st.global")


def _rows(w: WarpBatch, sources: tuple[Array, ...]) -> Array:
    """Convert registers to rows of bytes."""
    if len(sources) == 1:
        whole = np.ascontiguousarray(w.full(sources[0]))[:, None]
    else:
        whole = np.stack([w.full(s) for s in sources], axis=1)
    return whole.view(np.uint8)
