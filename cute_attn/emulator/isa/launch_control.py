"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.warp_batch import WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 400  # of virtual time, for the timeline
RESPONSE_BYTES = 16


_UNVERIFIED: dict[str, Any] = {"since": 100, "conformance": "unverified"}


@called(
    "clusterlaunchcontrol.try_cancel.async{|.shared::cta}.mbarrier::complete_tx::bytes{|.multicast::cluster::all}.b128",
    operands="$1 [] []",
    **_UNVERIFIED,
)
def try_cancel(w: WarpBatch, mask: Array | None, multicast: str, address: Array, barrier: Array) -> None:
    """Write the response, opaque to programs: the coordinates of the first CTA, and whether there is one."""
    for lane, at, bar in w.each(mask, address & OFFSET_MASK, barrier & OFFSET_MASK):
        origin = w.cta.grid.cancel()
        response = np.array([*origin, 1] if origin is not None else [0, 0, 0, 0], np.uint32).view("V16")
        ctas = w.cta.cluster.ctas if multicast else [w.cta]
        op = w.begin_op(int(w.row[lane]), "clusterlaunchcontrol.try_cancel")
        places = [cta.rank << RANK_SHIFT | bar for cta in ctas]
        waiting = [mbarrier.target(w.cta, place, op, "clusterlaunchcontrol.try_cancel") for place in places]

        w.cta.post(functools.partial(_answer, ctas, waiting, at, response, op))


def _answer(ctas: list[Cta], barriers: list[mbarrier.Mbarrier], at: int, response: Array, op: Op) -> None:
    for cta, barrier in zip(ctas, barriers, strict=True):
        offsets = np.array([at])
        cta.smem.check(offsets, RESPONSE_BYTES, "try_cancel")
        cta.smem.store(offsets, response, op, "try_cancel")
        barrier.complete(RESPONSE_BYTES, op, LATENCY)


_QUERY = "clusterlaunchcontrol.query_cancel"


@called(f"{_QUERY}.get_first_ctaid{{::x|::y|::z}}.b32.b128", operands="$0 v16", results="u4", **_UNVERIFIED)
def first_coordinate(w: WarpBatch, mask: Array | None, axis: str, response: Array) -> Array:
    return _word(response, "xyz".index(axis[-1]))


@called(f"{_QUERY}.is_canceled.pred.b128", operands="v16", results="p", **_UNVERIFIED)
def is_cancelled(w: WarpBatch, mask: Array | None, response: Array) -> Array:
    return _word(response, 3) != 0


def _word(response: Array, index: int) -> Array:
    return np.ascontiguousarray(response).view(np.uint32).reshape(-1, 4)[:, index].copy()
