"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.registry import called, computed
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.warp_batch import WarpBatch

LATENCY = 400  # of virtual time, for the timeline


_UNVERIFIED: dict[str, Any] = {"since": 100, "conformance": "unverified"}


@called(
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128",
    operands="[] []",
    **_UNVERIFIED,
)
def try_cancel(w: WarpBatch, mask: Array | None, address: Array, barrier: Array) -> None:
    """Write the response to each CTA, opaque to programs: coordinates of the first CTA, and whether there is one."""
    for lane, at, bar in w.each(mask, address & OFFSET_MASK, barrier & OFFSET_MASK):
        origin = w.cta.grid.cancel()
        response = np.array([*origin, 1] if origin is not None else [0, 0, 0, 0], np.uint32).view("V16")
        op = w.begin_op(int(w.row[lane]), "clusterlaunchcontrol.try_cancel")
        for cta in w.cta.cluster.ctas:
            waiting = mbarrier.target(w.cta, cta.rank << RANK_SHIFT | bar, op, "clusterlaunchcontrol.try_cancel")
            where = cta.smem, np.array([at])
            w.cta.post(functools.partial(mbarrier.deliver, *where, response, op, "try_cancel", waiting, LATENCY))


_QUERY = "clusterlaunchcontrol.query_cancel"


_WORD = "np.ascontiguousarray({{0}}).view(u4).reshape(-1, 4)[:, {}].copy()"
computed(
    {f"{_QUERY}.get_first_ctaid::{axis}.b32.b128": _WORD.format(i) for i, axis in enumerate("xyz")}
    | {f"{_QUERY}.is_canceled.pred.b128": f"{_WORD.format(3)} != 0"},
    kinds={"results": "^"},
    **_UNVERIFIED,
)
