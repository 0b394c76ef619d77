"""tensormap.replace, tensormap.cp_fenceproxy and the proxy fence of tensor maps.

A map in global memory that was changed is refused until a fence acquires it. One fence serves the whole grid here, and
the release on the writer's side is not asked for.
"""

from __future__ import annotations

import numpy as np

from cute_attn.emulator import access, tensormap
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import MemoryFault, PtxError
from cute_attn.emulator.isa.mma import whole
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.isa.tma import STALE
from cute_attn.emulator.ptx import Imm, Inst
from cute_attn.emulator.warp_batch import WarpBatch

_SPACE = "{|.global|.shared::cta}.b1024"
_ORDINALS = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
_IMMEDIATE = ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
_PART = 64  # bytes that a map is aligned to


@form(
    f"tensormap.replace.tile{{.global_address}}{_SPACE}.b64",
    f"tensormap.replace.tile{{.global_stride}}{_SPACE}.b64",
    f"tensormap.replace.tile{{.rank|.box_dim|.global_dim|.element_stride}}{_SPACE}.b32",
    f"tensormap.replace.tile{{.elemtype|.interleave_layout|.swizzle_mode|.fill_mode}}{_SPACE}.b32",
    since=90,
    conformance="unverified",
)
def replace(e: Emitter, inst: Inst, field: str, space: str) -> None:
    name = field[1:]
    target, *rest = inst.operands
    ordinal = rest.pop(0) if name in _ORDINALS else Imm(0)
    if not isinstance(ordinal, Imm) or ordinal.value not in range(_ORDINALS.get(name, 1)):
        raise PtxError(f"{inst.op} with ordinal {ordinal}")
    if name in _IMMEDIATE and not isinstance(rest[0], Imm):
        raise PtxError(f"{inst.op} needs an immediate")
    value = e.get(rest[0], "u8" if inst.op.endswith(".b64") else "u4")
    arguments = [e.address(target, wide=space != ".shared::cta"), value]
    e.call(_replace, [*arguments, repr(name), str(ordinal.value), repr(space)])


@form(f"tensormap.replace.tile{{.swizzle_atomicity}}{_SPACE}.b32", since=100, conformance="unverified")
def replace_atomicity(e: Emitter, inst: Inst, field: str, space: str) -> None:
    replace(e, inst, field, space)


def _replace(
    w: WarpBatch, mask: Array | None, address: Array, value: Array, field: str, ordinal: int, space: str
) -> None:
    values = w.full(value)
    for lane in w.lanes(mask):
        one = np.arange(w.size) == lane
        shared = space == ".shared::cta"
        if not space:
            inside, _ = access.generic_spaces(w, one, address)
            shared = bool(inside[lane])
        raw = _read(w, one, address, shared)
        _write(w, one, address, shared, tensormap.replaced(raw, field, ordinal, int(values[lane])))


def _read(w: WarpBatch, one: Array, address: Array, shared: bool) -> bytes:
    """The map at the address of the one lane of a mask."""
    lane, found = int(one.argmax()), b""
    for part in range(0, tensormap.BYTES, _PART):
        if shared:
            at = w.full(address).astype(np.uint32) + np.uint32(part)
            rows = access.load_shared(w, one, at, _PART, "tensormap.replace")
        else:
            rows = access.load_global(w, one, w.full(address) + np.uint64(part), _PART, "tensormap.replace")
        found += rows[lane].tobytes()
    return found


def _write(w: WarpBatch, one: Array, address: Array, shared: bool, raw: bytes) -> None:
    rows = np.frombuffer(raw, np.uint8).reshape(-1, _PART)
    for number, row in enumerate(rows):
        whole_rows = np.broadcast_to(row, (w.size, _PART))
        if shared:
            at = w.full(address).astype(np.uint32) + np.uint32(_PART * number)
            access.store_shared(w, one, at, whole_rows, "tensormap.replace")
        else:
            at = w.full(address) + np.uint64(_PART * number)
            access.store_global(w, one, at, whole_rows, "tensormap.replace")
    if not shared:
        w.cta.grid.tensor_maps[int(w.full(address)[one.argmax()])] = STALE


@form(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release{.cta|.cluster|.gpu|.sys}.sync.aligned",
    since=90,
    converges=True,
    conformance="unverified",
)
def copy_map(e: Emitter, inst: Inst, scope: str) -> None:
    target, source, size = inst.operands
    _check_size(inst, size)
    e.call(_copy, [e.address(target, wide=True), e.address(source, wide=False)])


def _check_size(inst: Inst, size: object) -> None:
    if not isinstance(size, Imm) or size.value != tensormap.BYTES:
        raise PtxError(f"{inst.op} needs the size {tensormap.BYTES}")


def _copy(w: WarpBatch, mask: Array | None, target: Array, source: Array) -> None:
    whole(w, mask, "tensormap.cp_fenceproxy")
    for lane in w.first_lanes(mask):
        one = np.arange(w.size) == lane
        _write(w, one, target, False, _read(w, one, source, True))


@form("fence.proxy.tensormap::generic.release{.cta|.cluster|.gpu|.sys}", since=90, conformance="unverified")
def release(e: Emitter, inst: Inst, scope: str) -> None:
    """Emit nothing."""


@form("fence.proxy.tensormap::generic.acquire{.cta|.cluster|.gpu|.sys}", since=90, conformance="unverified")
def acquire(e: Emitter, inst: Inst, scope: str) -> None:
    address, size = inst.operands
    _check_size(inst, size)
    e.call(_acquire, [e.address(address, wide=True)])


def _acquire(w: WarpBatch, mask: Array | None, address: Array) -> None:
    """Forget what was read at the address: the next use reads the map anew."""
    for lane in w.lanes(mask):
        at = int(w.full(address)[lane])
        if at % _PART:
            raise MemoryFault(f"the tensor map at {at:#x} is not aligned to {_PART} bytes", int(lane))
        w.cta.grid.tensor_maps.pop(at, None)
