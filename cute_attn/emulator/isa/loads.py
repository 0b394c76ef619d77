"""ld and st of the parameter, shared, shared::cluster, global and generic spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array, some, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.registry import form
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
_VEC = "{|.v2|.v4}"
_WEAK = "{|.weak|.volatile|.relaxed.cta|.relaxed.cluster|.relaxed.gpu|.relaxed.sys}"


@form(f"ld.param{_VEC}{_TYPES}", golden="memory")
def ld_param(e: Emitter, inst: Inst, vec: str, kind: str) -> None:
    d, source = inst.operands
    if not isinstance(source, Addr) or not isinstance(source.base, Sym):
        raise PtxError("ld.param needs a parameter's name")
    t = tag(kind)
    number = e.params[source.base.name]
    for i, item in enumerate(e.items(d)):
        e.set(item, t, f"w.cta.grid.param({number}, {source.offset + i * int(t[1])}, {t})")


@form(f"ld{_WEAK}{{.shared|.shared::cta|.shared::cluster}}{_SIZES}", golden="memory")
def ld_shared(e: Emitter, inst: Inst, strength: str, space: str, size: str) -> None:
    address = e.address(inst.operands[1], wide=False)
    _load(e, inst, _item(size), _ld_shared, [address, str(space == ".shared::cluster")])


def _ld_shared(w: WarpBatch, mask: Array | None, address: Array, cluster: bool, word: Any, count: int) -> list[Array]:
    rows = access.load_shared(w, mask, address, word.itemsize * count, "ld.shared", cluster)
    return _columns(rows, word)


def _item(size: str) -> str:
    """Type of one item of ".v4.b32" or ".b32"."""
    return "." + size.rpartition(".")[2]


@form(
    f"ld{_WEAK}.global{_CACHE}{_EVICT}{_SIZES}",
    f"ld.global{{|.ca|.cg|.cs}}.nc{_EVICT}{_SIZES}",
    f"ld{{|.volatile|.relaxed.gpu}}{_SIZES}",
    golden="memory",
)
def ld_global(e: Emitter, inst: Inst, *choices: str) -> None:
    arguments = [e.address(inst.operands[1], wide=True)]
    if ".global" not in inst.op:
        _load(e, inst, _item(choices[-1]), _ld_generic, arguments)
    else:
        order_of = ("'ld'", "False") if _strong(inst) else ("'ld.global'", "None")
        _load(e, inst, _item(choices[-1]), _ld_global, [*arguments, *order_of])


def _strong(inst: Inst) -> bool:
    return ".relaxed" in inst.op or ".volatile" in inst.op


@form("ld.acquire{.cta|.cluster|.gpu|.sys}{|.global}{.b32|.u32|.s32|.b64|.u64|.s64}", golden="memory")
def ld_acquire(e: Emitter, inst: Inst, scope: str, space: str, kind: str) -> None:
    _load(e, inst, kind, _ld_global, [e.address(inst.operands[1], wide=True), "'ld.acquire'", "True"])


def _ld_global(
    w: WarpBatch, mask: Array | None, address: Array, what: str, acquire: bool | None, word: Any, count: int
) -> list[Array]:
    """Load; `acquire` is None for a weak load, which orders nothing."""
    rows = access.load_global(w, mask, address, word.itemsize * count, what, strong=acquire is not None)
    if acquire is not None:
        order.observe(w, mask, address, acquire)
    return _columns(rows, word)


def _ld_generic(w: WarpBatch, mask: Array | None, address: Array, word: Any, count: int) -> list[Array]:
    shared, others = access.generic_spaces(w, mask, address)
    nbytes = word.itemsize * count
    rows: Array = np.zeros((w.size, nbytes), np.uint8)
    if some(others):
        rows = access.load_global(w, others, address, nbytes, "ld")
    if some(shared):
        low = w.full(address).astype(np.uint32)
        rows = np.where(shared[:, None], access.load_shared(w, shared, low, nbytes, "ld", True), rows)
    return _columns(rows, word)


def _columns(rows: Array, word: Any) -> list[Array]:
    words = rows.view(word)
    return [words[:, i] for i in range(words.shape[1])]


def _load(e: Emitter, inst: Inst, kind: str, function: Callable[..., Any], arguments: list[str]) -> None:
    """Call a function with the type and the number of the words that it loads."""
    items = e.items(inst.operands[0])
    e.call(function, [*arguments, tag(kind), str(len(items))], [(item, tag(kind)) for item in items], rows=True)


@form(f"st{_WEAK}{{.shared|.shared::cta|.shared::cluster}}{_SIZES}", golden="memory")
def st_shared(e: Emitter, inst: Inst, strength: str, space: str, size: str) -> None:
    address = e.address(inst.operands[0], wide=False)
    e.call(_st_shared, [address, _sources(e, inst, _item(size)), str(space == ".shared::cluster")])


def _st_shared(w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...], cluster: bool) -> None:
    access.store_shared(w, mask, address, _rows(w, sources), "st.shared", cluster)


@form(
    f"st{_WEAK}.global{{|.wb|.cg|.cs|.wt}}{_L1}{_SIZES}",
    f"st{{|.volatile|.relaxed.gpu}}{_SIZES}",
    golden="memory",
)
def st_global(e: Emitter, inst: Inst, *choices: str) -> None:
    arguments = [e.address(inst.operands[0], wide=True), _sources(e, inst, _item(choices[-1]))]
    if ".global" not in inst.op:
        e.call(_st_generic, arguments)
    else:
        e.call(_st_global, [*arguments, *(("'st'", "False") if _strong(inst) else ("'st.global'", "None"))])


@form("st.global.v8{.b32|.f32}", since=100, conformance="unverified")
def st_wide(e: Emitter, inst: Inst, kind: str) -> None:
    """Emit a store of 256 bits, whose address must be a multiple of 32."""
    e.call(_st_global, [e.address(inst.operands[0], wide=True), _sources(e, inst, kind), "'st.global'", "None"])


@form("st.release{.cta|.cluster|.gpu|.sys}{|.global}{.b32|.u32|.s32|.b64|.u64|.s64}", golden="memory")
def st_release(e: Emitter, inst: Inst, scope: str, space: str, kind: str) -> None:
    e.call(_st_global, [e.address(inst.operands[0], wide=True), _sources(e, inst, kind), "'st.release'", "True"])


def _st_global(
    w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...], what: str, release: bool | None
) -> None:
    """Store; `release` is None for a weak store, which orders nothing."""
    access.store_global(w, mask, address, _rows(w, sources), what, strong=release is not None)
    if release is not None:
        order.publish(w, mask, address, release)


def _st_generic(w: WarpBatch, mask: Array | None, address: Array, sources: tuple[Array, ...]) -> None:
    shared, others = access.generic_spaces(w, mask, address)
    rows = _rows(w, sources)
    if some(others):
        access.store_global(w, others, address, rows, "st")
    if some(shared):
        access.store_shared(w, shared, w.full(address).astype(np.uint32), rows, "st", True)


def _sources(e: Emitter, inst: Inst, kind: str) -> str:
    return e.values(inst.operands[1], f"u{tag(kind)[1]}")


def _rows(w: WarpBatch, sources: tuple[Array, ...]) -> Array:
    """Convert registers to rows of bytes."""
    if len(sources) == 1:
        whole = np.ascontiguousarray(w.full(sources[0]))[:, None]
    else:
        whole = np.stack([w.full(s) for s in sources], axis=1)
    rows: Array = whole.view(np.uint8)
    return rows
