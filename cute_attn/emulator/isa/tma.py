"""TMA: boxes of tensors between global and shared memory."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator import access, tensormap
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import MemoryFault, PtxError
from cute_attn.emulator.isa.bulk import HINT, MULTICAST, Task, destinations, open_group, post_load, posted_store
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.memory import GENERIC_PARAM
from cute_attn.emulator.warp_batch import WarpBatch

_DIMS = "{.1d|.2d|.3d|.4d|.5d}"
_PAIRS = (100, 103)  # architectures with pairs of CTAs
_GROUP = "{.cta_group::1|.cta_group::2}"


# --- tensors: loads ---------------------------------------------------------------------------------------------------


_LOAD = f"cp.async.bulk.tensor{_DIMS}"
_TILED = ".global{|.tile}.mbarrier::complete_tx::bytes"
_OPERANDS = "$op [u4] [u8]{i4} [u4] u4=0"


def _map_at(w: WarpBatch, address: int) -> tensormap.TensorMap:
    """Decode the tensor map at an address in the parameters or in global memory."""
    cache: dict[int, tensormap.TensorMap] = w.cta.grid.tensor_maps
    found = cache.get(address)
    if found is None:
        if address >> 56 == GENERIC_PARAM >> 56:
            start = address & ((1 << 56) - 1)
            raw = w.cta.grid.params[start : start + tensormap.BYTES]
        else:
            if address % 64:
                raise MemoryFault(f"the tensor map at {address:#x} is not aligned to 64 bytes")
            rows = access.read_global(w.cta, np.array([address]), tensormap.BYTES, None, "a tensor map's read")
            raw = rows.tobytes()
        found = cache[address] = tensormap.decode(raw)
    return found


@called(
    f"{_LOAD}.shared::cluster{_TILED}{MULTICAST}{_GROUP}{HINT}",
    f"{_LOAD}.shared::cluster{_TILED}{MULTICAST}.L2::cache_hint{_GROUP}",
    operands=_OPERANDS,
    since=100,
    only=_PAIRS,
    conformance="unverified",
)
@called(
    f"{_LOAD}.shared::cta{_TILED}{HINT}",
    f"{_LOAD}.shared::cluster{_TILED}{MULTICAST}{HINT}",
    operands=_OPERANDS,
    since=90,
    golden="tma",
)
def tensor_load(
    w: WarpBatch,
    mask: Array | None,
    opcode: str,
    target: Array,
    table: Array,
    coordinates: tuple[Array, ...],
    barrier: Array,
    ctas: Array,
) -> None:
    """Load boxes. With .cta_group::2 the barrier may be that of the CTA's peer."""
    multicast, pair = ".multicast::cluster" in opcode, ".cta_group::2" in opcode
    for lane, map_address, at, bar, named, *place in w.each(mask, table, target, barrier, ctas, *coordinates):
        tensor = _map_at(w, map_address)
        _check_place(tensor, place, lane)
        if at % 128:
            raise MemoryFault(f"TMA load to shared {at:#x}, which is not aligned to 128 bytes", lane)
        op = w.begin_op(int(w.row[lane]), "TMA load")
        pieces = tensormap.chunks(tensor, place, tensor.line_bytes)
        for to, own in destinations(at, bar, named, multicast, pair):
            post_load(w.cta, to, pieces, own, op, f"TMA load at {tuple(place)}")


def _check_place(tensor: tensormap.TensorMap, place: list[int], lane: int) -> None:
    if len(place) != tensor.rank:
        raise PtxError(f"{len(place)} coordinates of a tensor of rank {tensor.rank}", lane)
    if place[0] * tensor.item_bytes % tensormap.UNIT:
        raise MemoryFault(f"TMA at {tuple(place)}: a box must start at a multiple of 16 bytes", lane)


# --- tensors: stores --------------------------------------------------------------------------------------------------


@called(
    f"cp.async.bulk.tensor{_DIMS}.global.shared::cta{{|.tile}}.bulk_group{HINT}",
    operands="[u8]{i4} [u4]",
    since=90,
    golden="tma",
)
def tensor_store(w: WarpBatch, mask: Array | None, table: Array, coordinates: tuple[Array, ...], source: Array) -> None:
    tasks: dict[tuple[int, ...], Task] = {}
    for lane, map_address, at, *place in w.each(mask, table, source, *coordinates):
        tensor = _map_at(w, map_address)
        _check_place(tensor, place, lane)
        if min(place) < 0:  # unlike a load
            raise MemoryFault(f"TMA store at {tuple(place)}: no coordinate may be negative", lane)
        if at % 128:
            raise MemoryFault(f"TMA store from shared {at:#x}, which is not aligned to 128 bytes", lane)
        # A warp whose 32 lanes all store one box issues 32 stores with the effect of one.
        key = (int(w.row[lane]), map_address, at, *place)
        if key not in tasks:
            op = w.begin_op(int(w.row[lane]), "TMA store")
            pieces = tensormap.chunks(tensor, place, tensor.stored_line_bytes)
            tasks[key] = posted_store(w.cta, at, pieces, op, f"TMA store at {tuple(place)}")
        open_group(w, lane).append(tasks[key])
