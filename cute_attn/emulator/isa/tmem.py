"""tcgen05.alloc, dealloc, ld, st, wait and fence: access of threads to tensor memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.clocks import FENCED, TMEM
from cute_attn.emulator.dtypes import Array, some
from cute_attn.emulator.errors import LaunchFault, MemoryFault, PtxError
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.tensor_memory import WARP, Places, TensorMemory, places, split_address
from cute_attn.emulator.warp_batch import Wait, WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

ARCHS = (100, 103)
GROUP = ".cta_group::{1|2}"
_LD, _ST = "tcgen05.ld.32x32b", "tcgen05.st.32x32b"
_NUM = ".x{1|2|4|8|16|32|64|128}"


tensor_form = functools.partial(form, since=100, only=ARCHS)
tensor_call = functools.partial(called, since=100, only=ARCHS)


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
        self.asking = [each.unit("tcgen05 asking", list[_Allocating]) if group == 2 else [] for each in pair]
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


@tensor_call(
    f"tcgen05.alloc{GROUP}.sync.aligned{{|.shared::cta}}.b32", operands="$0 [] u4", solo=True, aligned="tcgen05.alloc"
)
def alloc(w: WarpBatch, mask: Array | None, group: str, address: Array, count: Array) -> None:
    lanes = w.first_lanes(mask)
    if len(lanes) > 1:
        raise MemoryFault("tcgen05.alloc by more than one warp at once")
    columns, target = w.uniform(count, mask, "column count"), w.uniform(address, mask, "address")
    memory_of(w.cta).check_allocation(columns)
    waiting = _Allocating(w.cta, int(w.lane_agents[lanes[0]]), target, columns, int(group))
    if not waiting.ready():
        w.wait = waiting


@tensor_call(f"tcgen05.dealloc{GROUP}.sync.aligned.b32", operands="$0 u4 u4", aligned="tcgen05.dealloc")
def dealloc(w: WarpBatch, mask: Array | None, group: str, address: Array, count: Array) -> None:
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


@functools.lru_cache(512)
def _places(num: int, warp: int, address: int, what: str) -> Places:
    """The places that a warp moves: its 32 lanes by `num` columns, from its address on."""
    (at, column), own = split_address(address), 32 * (warp % 4)
    if at != own:
        raise MemoryFault(f"{what} at lane {at} of tensor memory by warp {warp}, which may touch {own}..{own + 31}")
    return places(at + np.arange(32), column + np.arange(num))


def _moved(
    w: WarpBatch, mask: Array | None, asked: str, count: int, address: Array, what: str
) -> Iterator[tuple[int, slice, Places]]:
    """The active warps: agent, lanes of the batch, and the places that it moves from or to `count` registers."""
    if count != int(asked):
        raise PtxError(f"{what}.x{asked} with {count} registers, it has {asked}")
    at = w.full(address)
    for first in w.first_lanes(mask):
        lanes = slice(first, first + 32)
        if some(at[lanes] != at[first]):
            raise PtxError(f"{what}: the address differs within a warp")
        row = w.row[first]
        yield int(w.agents[row]), lanes, _places(count, int(w.warps[row]), int(at[first]), what)


@tensor_call(f"tcgen05.ld.sync.aligned.32x32b{_NUM}.b32", operands="$0 $items [u4]", results="{u4}", aligned=_LD)
def load(w: WarpBatch, mask: Array | None, asked: str, num: int, address: Array) -> Array:
    """Load columns. With `strict`, the read lasts until it is waited for, otherwise it is over at once."""
    memory, found = memory_of(w.cta), np.zeros((num, w.size), np.uint32)
    for agent, lanes, place in _moved(w, mask, asked, num, address, _LD):
        found[:, lanes] = memory.load(place, memory.begin(agent, "tcgen05.ld") if w.cta.grid.strict else agent, _LD).T
    return found


@tensor_call(f"tcgen05.st.sync.aligned.32x32b{_NUM}.b32", operands="$0 [u4] {u4}", aligned=_ST)
def store(w: WarpBatch, mask: Array | None, asked: str, address: Array, values: tuple[Array, ...]) -> None:
    memory, words = memory_of(w.cta), np.array([w.full(v) for v in values]).T
    for agent, lanes, place in _moved(w, mask, asked, len(values), address, _ST):
        memory.store(place, words[lanes], memory.begin(agent, "tcgen05.st"), _ST)


@tensor_call("tcgen05.wait::{ld|st}.sync.aligned", operands="$0", aligned="tcgen05.wait")
def wait(w: WarpBatch, mask: Array | None, which: str) -> None:
    memory = memory_of(w.cta)
    for lane in w.first_lanes(mask):
        stream = memory.streams.get((int(w.lane_agents[lane]), f"tcgen05.{which}", WARP))
        if stream is not None:
            stream.wait()


@tensor_call("tcgen05.fence::{before|after}_thread_sync", operands="$0")
def fence(w: WarpBatch, mask: Array | None, side: str) -> None:
    w.cta.clocks.tensor_fence(w.active_agents(mask), FENCED if side == "before" else TMEM)
