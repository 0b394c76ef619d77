"""tcgen05.ld.red: loads from tensor memory that also reduce each thread's columns. sm_103a only.

The ISA has no word on zeros and NaN here: those of redux.sync are taken. With .16x32bx2 each thread reduces the columns
that it loads, of one of the two accesses. An odd column is refused: a GB300 reports a misaligned address (measured by
others), though the ISA does not forbid it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import MemoryFault
from cute_attn.emulator.isa import floats, tmem
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst
from cute_attn.emulator.warp_batch import WarpBatch

_FORM = "tcgen05.ld.red.sync.aligned{.32x32b|.16x32bx2}{.x2|.x4|.x8|.x16|.x32|.x64|.x128}"


@form(
    f"{_FORM}{{.min|.max}}{{|.abs}}{{|.NaN}}.f32",
    f"{_FORM}{{.min|.max}}{{.u32|.s32}}",
    f"{_FORM}{{.u32|.s32}}{{.min|.max}}",  # as in the ISA's example
    since=100,
    only=(103,),
    converges=True,
    conformance="unverified",
)
def load_reduced(e: Emitter, inst: Inst, shape: str, num: str, *choices: str) -> None:
    registers, result, *rest = inst.operands
    e.call(_check_column, [e.address(rest[0], wide=False)])
    tmem.load(e, inst._replace(operands=(registers, *rest)), shape, num, "")  # leaves the words in t
    kind = "f4" if ".f32" in choices or inst.op.endswith(".f32") else "u4" if ".u32" in choices else "i4"
    how = _Reduction(kind, ".max" in choices, ".abs" in choices, ".NaN" in choices)
    e.set(result, "u4", f"{e.bind(how, 'reduction')}(t)")


def _check_column(w: WarpBatch, mask: Array | None, address: Array) -> None:
    odd = w.full(address)[w.lanes(mask)] & np.uint32(1)
    if odd.any():
        raise MemoryFault("tcgen05.ld.red at an odd column of tensor memory")


@dataclass(frozen=True)
class _Reduction:
    kind: str
    largest: bool
    absolute: bool
    nan: bool

    def __call__(self, words: Array) -> Array:
        """Reduce words [registers, lanes] to one per lane."""
        x = np.ascontiguousarray(words).view(self.kind)
        if self.kind == "f4":
            found = floats.extreme(np.abs(x) if self.absolute else x, self.largest, self.nan)
        else:
            found = x.max(axis=0) if self.largest else x.min(axis=0)
        result: Array = np.ascontiguousarray(found).view(np.uint32)
        return result
