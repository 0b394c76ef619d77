"""tcgen05.alloc, dealloc, ld, st, wait and fence: access of threads to tensor memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.clocks import Clocks
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import LaunchFault, MemoryFault, PtxError
from cute_attn.emulator.isa.barriers import on_clocks
from cute_attn.emulator.isa.mma import whole
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.tensor_memory import WARP, TensorMemory, cells, split_address
from cute_attn.emulator.warp_batch import Wait, WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

ARCHS = (100, 103)
GROUP = ".cta_group::{1|2}"
_NUM = ".x{1|2|4|8|16|32|64|128}"


tensor_form = functools.partial(form, since=100, only=ARCHS, conformance="unverified")
tensor_call = functools.partial(called, since=100, only=ARCHS, conformance="unverified")


def memory_of(cta: Cta) -> TensorMemory:
    make = functools.partial(TensorMemory, cta.clocks, cta.grid.checks)
    return cta.unit("tcgen05", make, functools.partial(_check_leak, cta.index))


def _check_leak(index: tuple[int, int, int], memory: TensorMemory) -> None:
    left = np.count_nonzero(memory.owner)
    if left:
        raise MemoryFault(f"CTA {index} ends without giving {left} columns of tensor memory back")


def pair_of(cta: Cta, group: int) -> list[Cta]:
    """CTAs that an operation of this group size applies to, the even one first. A kernel must not mix group sizes."""
    before = cta.grid.cta_group
    if before not in (0, group):
        raise PtxError(f".cta_group::{group} in a kernel that has used .cta_group::{before}")
    cta.grid.cta_group = group
    if group == 1:
        return [cta]
    even = cta.rank & ~1
    if even + 1 >= len(cta.cluster.ctas):
        raise LaunchFault(f".cta_group::2 in CTA {cta.index}, which has no peer in its cluster")
    return cta.cluster.ctas[even : even + 2]


# --- allocation -------------------------------------------------------------------------------------------------------


class _Allocating(Wait):
    """Waits until there is room and, in a CTA pair, until the peer asks for the same."""

    def __init__(self, cta: Cta, agent: int, target: int, columns: int, group: int) -> None:
        super().__init__(f"tcgen05.alloc of {columns} columns")
        self.cta, self.agent, self.target, self.columns = cta, agent, target, columns
        pair = pair_of(cta, group)
        self.asking = [of.unit("tcgen05 asking", list[_Allocating]) if group == 2 else [] for of in pair]
        self.asking[pair.index(cta)].append(self)

    def grant(self, start: int) -> None:
        memory_of(self.cta).allocate(start, self.columns)
        offset = access.offsets_of(np.array([self.target], np.uint32))
        self.cta.smem.check(offset, 4, "tcgen05.alloc")
        self.cta.smem.store(offset, np.array([start], np.uint32), np.array([self.agent]), "tcgen05.alloc")
        self.done = True

    def ready(self) -> bool:
        if self.done:
            return True
        requests = [asking[0] for asking in self.asking if asking]
        if self not in requests or len(requests) < len(self.asking):
            return False
        if len({request.columns for request in requests}) > 1:
            raise MemoryFault("tcgen05.alloc: the CTAs of a pair ask for different numbers of columns")
        owners = np.array([memory_of(request.cta).owner for request in requests])
        free = (owners == 0).all(axis=0).reshape(-1, self.columns).all(axis=1)  # by place, aligned to the count
        if not free.any():
            return False
        start = int(free.argmax()) * self.columns
        for request, asking in zip(requests, self.asking, strict=True):
            request.grant(start)
            asking.pop(0)
        return True


@tensor_call(f"tcgen05.alloc{GROUP}.sync.aligned{{|.shared::cta}}.b32", operands="$0 [] u4", solo=True, converges=True)
def alloc(w: WarpBatch, mask: Array | None, group: str, address: Array, count: Array) -> None:
    whole(w, mask, "tcgen05.alloc")
    lanes = w.first_lanes(mask)
    if len(lanes) > 1:
        raise MemoryFault("tcgen05.alloc by more than one warp at once")
    columns, target = w.uniform(count, mask, "column count"), w.uniform(address, mask, "address")
    memory_of(w.cta).check_allocation(columns)
    waiting = _Allocating(w.cta, int(w.lane_agents[lanes[0]]), target, columns, int(group))
    if not waiting.ready():
        w.wait = waiting


@tensor_call(f"tcgen05.dealloc{GROUP}.sync.aligned.b32", operands="$0 u4 u4", converges=True)
def dealloc(w: WarpBatch, mask: Array | None, group: str, address: Array, count: Array) -> None:
    whole(w, mask, "tcgen05.dealloc")
    pair_of(w.cta, int(group))
    memory = memory_of(w.cta)
    first = w.first_lanes(mask)
    for lane, start, columns in zip(first, w.full(address)[first].tolist(), w.full(count)[first].tolist(), strict=True):
        memory.free(start, columns, int(w.lane_agents[lane]))


@tensor_call(f"tcgen05.relinquish_alloc_permit{GROUP}.sync.aligned", operands="$0", converges=True)
def relinquish(w: WarpBatch, mask: Array | None, group: str) -> None:
    pair_of(w.cta, int(group))
    memory_of(w.cta).relinquished = True


# --- loads and stores -------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Places in tensor memory: lanes [warps, 32, 1] and columns [warps, 1, registers]. Of each warp: its cells of the
    shadow state."""

    lanes: Array
    columns: Array
    cells: list[Array]


@functools.lru_cache(512)
def _places(num: int, warps: tuple[int, ...], addresses: tuple[int, ...], what: str) -> Places:
    """The places that each warp moves: its 32 lanes by `num` columns, from its address on."""
    bases = np.array([split_address(a) for a in addresses])
    for warp, (at, _) in zip(warps, bases, strict=True):
        own = 32 * (warp % 4)
        if at != own:
            raise MemoryFault(f"{what} at lane {at} of tensor memory by warp {warp}, which may touch {own}..{own + 31}")
    lanes, columns = bases[:, :1] + np.arange(32), bases[:, 1:] + np.arange(num)
    shadow = [cells(*pair) for pair in zip(lanes, columns, strict=True)]
    return Places(lanes[:, :, None], columns[:, None, :], shadow)


def _check_registers(what: str, num: str, count: int) -> None:
    if count != int(num):
        raise PtxError(f"{what}.x{num} with {count} registers, it has {num}")


def _present(w: WarpBatch, mask: Array | None, num: int, address: Array, what: str) -> tuple[Array, Places]:
    """Positions of the active warps, and the places that they move."""
    whole(w, mask, what)
    first = w.first_lanes(mask)
    at = w.full(address)
    active = w.lanes(mask)
    if (at[active] != at[w.row[active] * 32 + first[0] % 32]).any():
        raise PtxError(f"{what}: the address differs within a warp")
    rows = w.row[first]
    return rows, _places(num, tuple(w.warps[rows].tolist()), tuple(at[first].tolist()), what)


@tensor_call(f"tcgen05.ld.sync.aligned.32x32b{_NUM}.b32", operands="$0 $items [u4]", results="{u4}", converges=True)
def load(w: WarpBatch, mask: Array | None, asked: str, num: int, address: Array) -> Array:
    what = "tcgen05.ld.32x32b"
    _check_registers(what, asked, num)
    memory = memory_of(w.cta)
    rows, places = _present(w, mask, num, address, what)
    for columns in places.columns:
        memory.check(columns, what)
    memory.check_valid(places.lanes, places.columns, what)
    for row, columns, touched in zip(rows, places.columns, places.cells, strict=True):
        _note_read(w, memory, int(w.agents[row]), columns, touched, what)
    found = memory.words[places.lanes, places.columns]
    result = np.ascontiguousarray(found.reshape(-1, num).T)
    if len(rows) == len(w.warps):
        return result
    out = np.zeros((num, len(w.warps), 32), np.uint32)
    out[:, rows] = result.reshape(num, len(rows), 32)
    return out.reshape(num, -1)


def _note_read(w: WarpBatch, memory: TensorMemory, agent: int, columns: Array, touched: Array, what: str) -> None:
    """Record a read for race checks. With `strict` it lasts until it is waited for, otherwise it is over at once."""
    if memory.shadow is None:
        return
    if w.cta.grid.strict:
        op = memory.begin(agent, "tcgen05.ld")
        conflict = memory.shadow.op_read(touched, op)
    else:
        # A row for each cell: those of one load lie in two to four blocks, and no row may cross a block.
        conflict = memory.shadow.read(touched[:, None], np.full(len(touched), agent))
    memory.refuse(what, columns, conflict)


@tensor_call(f"tcgen05.st.sync.aligned.32x32b{_NUM}.b32", operands="$0 [u4] {u4}", converges=True)
def store(w: WarpBatch, mask: Array | None, asked: str, address: Array, values: tuple[Array, ...]) -> None:
    what = "tcgen05.st.32x32b"
    _check_registers(what, asked, len(values))
    memory = memory_of(w.cta)
    rows, places = _present(w, mask, len(values), address, what)
    words = np.array([w.full(v) for v in values]).reshape(len(values), -1, 32)[:, rows].transpose(1, 2, 0)
    for row, columns, touched in zip(rows, places.columns, places.cells, strict=True):
        memory.check(columns, what)
        op = memory.begin(int(w.agents[row]), "tcgen05.st")
        if memory.shadow is not None:
            memory.refuse(what, columns, memory.shadow.op_write(touched, op))
    memory.words[places.lanes, places.columns] = words
    memory.valid[places.lanes, places.columns] = True


@tensor_call("tcgen05.wait::{ld|st}.sync.aligned", operands="$0", converges=True)
def wait(w: WarpBatch, mask: Array | None, which: str) -> None:
    whole(w, mask, "tcgen05.wait")
    memory = memory_of(w.cta)
    for lane in w.first_lanes(mask):
        stream = memory.streams.get((int(w.lane_agents[lane]), f"tcgen05.{which}", WARP))
        if stream is not None:
            stream.wait()


tensor_call("tcgen05.fence::before_thread_sync")(on_clocks(Clocks.fence_before))
tensor_call("tcgen05.fence::after_thread_sync")(on_clocks(Clocks.fence_after))
