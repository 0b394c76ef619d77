"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.ptx import Inst
from cute_attn.emulator.warp_batch import WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 400  # of virtual time, for the timeline
RESPONSE_BYTES = 16


_SPACE = "{|.shared::cta}"


@form(
    f"clusterlaunchcontrol.try_cancel.async{_SPACE}.mbarrier::complete_tx::bytes{{|.multicast::cluster::all}}.b128",
    since=100,
    conformance="unverified",
)
def try_cancel(e: Emitter, inst: Inst, space: str, multicast: str) -> None:
    e.call(_try_cancel, [*(e.shared_address(x, space) for x in inst.operands), str(bool(multicast))])


def _try_cancel(w: WarpBatch, mask: Array | None, address: Array, barrier: Array, multicast: bool) -> None:
    """Write the response, opaque to programs: the coordinates of the first CTA, and whether there is one."""
    for lane, at, bar in w.each(mask, address & OFFSET_MASK, barrier & OFFSET_MASK):
        origin = w.cta.grid.cancel()
        response = np.array([*origin, 1] if origin is not None else [0, 0, 0, 0], np.uint32).view("V16")
        ctas = w.cta.cluster.ctas if multicast else [w.cta]
        op = w.begin_op(int(w.row[lane]), "clusterlaunchcontrol.try_cancel")
        places = [cta.rank << RANK_SHIFT | bar for cta in ctas]
        waiting = [mbarrier.target(w.cta, place, op, "clusterlaunchcontrol.try_cancel") for place in places]

        w.cta.post(functools.partial(_answer, ctas, waiting, at, response, op))


def _answer(ctas: list[Cta], barriers: list[mbarrier.Mbarrier], at: int, response: Array, op: Op | None) -> None:
    for cta, barrier in zip(ctas, barriers, strict=True):
        offsets = access.offsets_of(np.array([at], np.uint32))
        cta.smem.check(offsets, RESPONSE_BYTES, "try_cancel")
        cta.smem.op_store(offsets, response, op, "try_cancel")
        barrier.complete(RESPONSE_BYTES, op, LATENCY)


@form("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", since=100, conformance="unverified")
def is_cancelled(e: Emitter, inst: Inst) -> None:
    d, response = inst.operands
    e.set(d, "p", f"{e.bind(_word, 'word')}({e.get(response, 'v16')}, 3) != 0")


@form("clusterlaunchcontrol.query_cancel.get_first_ctaid{::x|::y|::z}.b32.b128", since=100, conformance="unverified")
def first_coordinate(e: Emitter, inst: Inst, axis: str) -> None:
    d, response = inst.operands
    e.set(d, "u4", f"{e.bind(_word, 'word')}({e.get(response, 'v16')}, {'xyz'.index(axis[-1])})")


@form("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128", since=100, conformance="unverified")
def first_cta(e: Emitter, inst: Inst) -> None:
    d, response = inst.operands
    word, text = e.bind(_word, "word"), e.get(response, "v16")
    for i, item in enumerate(e.items(d)):
        e.set(item, "u4", f"{word}({text}, {i})")


def _word(response: Array, index: int) -> Array:
    words: Array = np.ascontiguousarray(response).view(np.uint32).reshape(-1, 4)[:, index].copy()
    return words
