"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.bulk import deliver
from cute_attn.emulator.isa.registry import called, computed
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.warp_batch import WarpBatch

LATENCY = 400  # of virtual time, for the timeline


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
        op = w.begin_op(int(w.row[lane]), "clusterlaunchcontrol.try_cancel")
        for cta in w.cta.cluster.ctas if multicast else [w.cta]:
            waiting = mbarrier.target(w.cta, cta.rank << RANK_SHIFT | bar, op, "clusterlaunchcontrol.try_cancel")
            answer = functools.partial(deliver, cta.smem, np.array([at]), response, op, "try_cancel", waiting, LATENCY)
            w.cta.post(answer)


_QUERY = "clusterlaunchcontrol.query_cancel"


_WORD = "np.ascontiguousarray({{0}}).view(u4).reshape(-1, 4)[:, {}].copy()"
computed(
    {f"{_QUERY}.get_first_ctaid::{axis}.b32.b128": _WORD.format(i) for i, axis in enumerate("xyz")}
    | {f"{_QUERY}.is_canceled.pred.b128": f"{_WORD.format(3)} != 0"},
    kinds={"results": "^"},
    **_UNVERIFIED,
)
