"""ld and st of the parameter, shared, shared::cluster and global spaces."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Addr, Inst, Sym
from cute_attn.emulator.warp_batch import WarpBatch

_TYPES = "{.b8|.u8|.s8|.b16|.u16|.s16|.b32|.u32|.s32|.f32|.b64|.u64|.s64|.f64}"
_NARROW = ".b8|.u8|.s8|.b16|.u16|.s16|.b32|.u32|.s32|.f32"
_PAIRS = f"{_TYPES[1:-1]}|.v2" + "|.v2".join(_TYPES[1:-1].split("|"))
_SIZES = "{" + _PAIRS + "|.v4" + "|.v4".join(_NARROW.split("|")) + "}"  # up to 128 bits
_CACHE = "{|.ca|.cg|.cs|.lu|.cv}"
_L1 = "{|.L1::no_allocate|.L1::evict_first|.L1::evict_last}"
_PREFETCH = "{|.L2::64B|.L2::128B|.L2::256B}"
_EVICT = f"{_L1}{_PREFETCH}"
_STRONG = ".volatile|.relaxed.cta|.relaxed.cluster|.relaxed.gpu|.relaxed.sys"
_TO_GLOBAL = f".global{{|.wb|.cg|.cs|.wt}}{_L1}{_SIZES}"
_ORDERED = "{.cta|.cluster|.gpu|.sys}{|.global}{.b32|.u32|.s32|.b64|.u64|.s64}"
_SHARED = f"{{|.weak|{_STRONG}}}.shared{{|::cta|::cluster}}{_SIZES}"


@form(f"ld.param{{|.v2|.v4}}{_TYPES}", golden="memory")
def ld_param(e: Emitter, inst: Inst, vec: str, kind: str) -> None:
    d, source = inst.operands
    if not isinstance(source, Addr) or not isinstance(source.base, Sym):
        raise PtxError("ld.param needs a parameter's name")
    t = tag(kind)
    number = e.params[source.base.name]
    for i, item in enumerate(e.items(d)):
        e.set(item, t, f"w.cta.grid.param({number}, {source.offset + i * int(t[1])}, {t})")


# --- loads ------------------------------------------------------------------------------------------------------------


@called(f"ld{_SHARED}", operands="$type $items [u4] $1", results="{.}", golden="memory")
def ld_shared(w: WarpBatch, mask: Array | None, word: Any, count: int, address: Array, space: str) -> list[Array]:
    rows = access.load_shared(w, mask, address, word.itemsize * count, "ld.shared", space == "::cluster")
    return _columns(rows, word)


@called(
    f"ld{{|.weak}}.global{_CACHE}{_EVICT}{_SIZES}",
    f"ld.global{{|.ca|.cg|.cs}}.nc{_EVICT}{_SIZES}",
    f"ld{{{_STRONG}}}.global{_CACHE}{_EVICT}{_SIZES}",
    f"ld.acquire{_ORDERED}",
    operands="$op $type $items [u8]",
    results="{.}",
    golden="memory",
)
def ld_global(w: WarpBatch, mask: Array | None, op: str, word: Any, count: int, address: Array) -> list[Array]:
    strong = op.startswith(("ld.volatile", "ld.relaxed", "ld.acquire"))
    rows = access.load_global(w, mask, address, word.itemsize * count, "ld.global", strong)
    if strong:
        order.observe(w, mask, address, acquire=op.startswith("ld.acquire"))
    return _columns(rows, word)


def _columns(rows: Array, word: Any) -> list[Array]:
    words = rows.view(word)
    return [words[:, i] for i in range(words.shape[1])]


# --- stores -----------------------------------------------------------------------------------------------------------


@called(f"st{_SHARED}", operands="[u4] {.} $1", golden="memory")
def st_shared(w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...], space: str) -> None:
    access.store_shared(w, mask, address, _rows(w, sources), "st.shared", space == "::cluster")


@called("st.global.v8{.b32|.f32}", operands="$op [u8] {.}", since=100, conformance="unverified")  # at multiples of 32
@called(
    f"st{{|.weak}}{_TO_GLOBAL}",
    f"st{{{_STRONG}}}{_TO_GLOBAL}",
    f"st.release{_ORDERED}",
    operands="$op [u8] {.}",
    golden="memory",
)
def st_global(w: WarpBatch, mask: Array | None, op: str, address: Array, sources: tuple[Array, ...]) -> None:
    strong = op.startswith(("st.volatile", "st.relaxed", "st.release"))
    access.store_global(w, mask, address, _rows(w, sources), "st.global", strong)
    if strong:
        order.publish(w, mask, address, release=op.startswith("st.release"))


def _rows(w: WarpBatch, sources: tuple[Array, ...]) -> Array:
    """Convert registers to rows of bytes."""
    if len(sources) == 1:
        whole = np.ascontiguousarray(w.full(sources[0]))[:, None]
    else:
        whole = np.stack([w.full(s) for s in sources], axis=1)
    return whole.view(np.uint8)
