"""setmaxnreg: registers that the warps of a CTA give to a pool and take from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import PtxError, RegisterFault
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.warp_batch import Wait, WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta


class Pool:
    """Registers of a CTA. The pool is empty at launch: it holds what setmaxnreg.dec has released."""

    def __init__(self, num_warps: int, at_launch: int) -> None:
        self.at_launch = at_launch  # of a thread
        self.held = np.full(num_warps, at_launch)  # of a thread, by warp
        self.total = 32 * num_warps * at_launch

    @property
    def free(self) -> int:
        return self.total - 32 * int(self.held.sum())

    def missing(self, warps: Array, count: int) -> int:
        """Number of registers that the pool lacks for these warps to hold `count` a thread."""
        return 32 * int((count - self.held[warps]).sum()) - self.free


def pool_of(cta: Cta) -> Pool:
    return cta.unit("registers", lambda: Pool(cta.num_warps, cta.grid.registers))


@called("setmaxnreg.inc.sync.aligned.u32", operands="#", since=90, solo=True, aligned="setmaxnreg.inc")
def claim(w: WarpBatch, mask: Array | None, count: int) -> None:
    warps, pool = _warps(w, mask, count, "setmaxnreg.inc"), pool_of(w.cta)
    most = int(pool.held[warps].max())
    if most > count:
        raise RegisterFault(f"setmaxnreg.inc to {count} by a warp that holds {most} registers a thread")

    def granted() -> bool:
        missing = pool.missing(warps, count)
        if missing <= 0:
            pool.held[warps] = count
            return True
        waiting.what = (
            f"setmaxnreg.inc to {count} lacks {missing} registers: {pool.free} of the CTA's {pool.total} "
            f"({pool.at_launch} a thread at launch) are free, its warps hold {', '.join(map(str, pool.held))}"
        )
        return False

    waiting = Wait("", granted)
    if not granted():
        w.wait = waiting


@called("setmaxnreg.dec.sync.aligned.u32", operands="#", since=90, aligned="setmaxnreg.dec")
def release(w: WarpBatch, mask: Array | None, count: int) -> None:
    warps, pool = _warps(w, mask, count, "setmaxnreg.dec"), pool_of(w.cta)
    least = int(pool.held[warps].min())
    if least < count:
        raise RegisterFault(f"setmaxnreg.dec to {count} by a warp that holds {least} registers a thread")
    pool.held[warps] = count


def _warps(w: WarpBatch, mask: Array | None, count: int, what: str) -> Array:
    if count % 8 or not 24 <= count <= 256:
        raise PtxError(f"{what} {count}: a multiple of 8 between 24 and 256 is needed")
    return w.warps[w.row[w.first_lanes(mask)]]
