"""atom and red on integers in global and shared memory, lane by lane in ascending order."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.warp_batch import WarpBatch

_ORDER = "{|.relaxed.gpu|.acquire.gpu|.release.gpu|.acq_rel.gpu}"
_FORM = f"{_ORDER}{{|.global|.shared}}{{.add|.min|.max|.and|.or|.xor}}{{.b32|.u32|.s32|.b64|.u64|.s64}}"

UFUNCS: dict[str, np.ufunc] = {
    ".add": np.add,
    ".min": np.minimum,
    ".max": np.maximum,
    ".and": np.bitwise_and,
    ".or": np.bitwise_or,
    ".xor": np.bitwise_xor,
}

_ATOMIC: dict[str, Any] = {"operands": "$0 $1 $2 $type [*] ."}


@called(f"red{_FORM}", **_ATOMIC)
@called(f"atom{_FORM}", results=".", **_ATOMIC)
def atomic(
    w: WarpBatch, mask: Array | None, sem: str, space: str, op: str, word: Any, address: Array, x: Array
) -> Array:
    width, shared = word.itemsize, space == ".shared"
    old, at, x = np.zeros(w.size, word), w.full(address), w.full(x)
    if shared:
        access.update_shared(w, mask, address, width, "atom")
    else:
        access.check_aligned(at[w.lanes(mask)], width, "atom")
        if sem in (".release.gpu", ".acq_rel.gpu"):
            order.release(w, mask, address)
    for lane in w.lanes(mask):
        if shared:
            memory, (offset,) = access.shared_at(w, at[lane : lane + 1], width, "atom")
            row = memory.bytes.data[offset : offset + width]
        else:
            row = access.read_global(w.cta, at[lane : lane + 1], width, None, "atom")[0]
        before = row.view(word)
        after = UFUNCS[op](before, x[lane]).view(np.uint8)
        old[lane] = before[0]
        if shared:
            row[:] = after
        else:
            access.write_global(w.cta, at[lane : lane + 1], after[None], None, "atom")
    if not shared and sem in (".acquire.gpu", ".acq_rel.gpu"):
        order.acquire(w, mask, address)
    return old
