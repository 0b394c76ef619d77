"""atom and red on global and shared memory, lane by lane in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.registry import called
from cute_attn.emulator.warp_batch import WarpBatch

_ORDER = "{|.relaxed|.acquire|.release|.acq_rel}{|.cta|.cluster|.gpu|.sys}"
_SPACE = "{|.global|.shared|.shared::cta|.shared::cluster}"
_INTEGER_OPS = "{.add|.min|.max|.and|.or|.xor|.exch|.inc|.dec}{.b32|.u32|.s32|.b64|.u64|.s64}"

Update = Callable[[Array, Array], Array]

UFUNCS: dict[str, np.ufunc] = {
    ".add": np.add,
    ".min": np.minimum,
    ".max": np.maximum,
    ".and": np.bitwise_and,
    ".or": np.bitwise_or,
    ".xor": np.bitwise_xor,
}
UPDATES: dict[str, Update] = {
    **UFUNCS,
    ".exch": lambda old, x: x,
    ".inc": lambda old, x: np.where(old >= x, x.dtype.type(0), old + x.dtype.type(1)),
    ".dec": lambda old, x: np.where((old == 0) | (old > x), x, old - x.dtype.type(1)),
}


_SUM = f"{_ORDER}{_SPACE}{{.add}}{{.f32|.f64}}"
_ATOMIC: dict[str, Any] = {"operands": "$0 $2 $3 $type [*] . .=None", "golden": "atomics"}


@called(f"red{_ORDER}{_SPACE}{_INTEGER_OPS}", f"red.async{_ORDER}{_SPACE}{_INTEGER_OPS}", **_ATOMIC)
@called(f"red{_SUM}", conformance="approx", **_ATOMIC)
@called(
    f"atom{_ORDER}{_SPACE}{_INTEGER_OPS}",
    f"atom{_ORDER}{_SPACE}{{.cas}}{{.b32|.u32|.b64|.u64}}",
    results=".",
    **_ATOMIC,
)
@called(f"atom{_SUM}", conformance="approx", results=".", **_ATOMIC)
def atomic(
    w: WarpBatch,
    mask: Array | None,
    sem: str,
    space: str,
    op: str,
    word: Any,
    address: Array,
    x: Array,
    other: Array | None,
) -> Array:
    width, shared = word.itemsize, space.startswith(".shared")
    old, at, x = np.zeros(w.size, word), w.full(address), w.full(x)
    if shared:
        access.update_shared(w, mask, address, width, "atom", space == ".shared::cluster")
    else:
        access.check_aligned(at[w.lanes(mask)], width, "atom")
        order.publish(w, mask, address, release=sem in (".release", ".acq_rel"))
    for lane in w.lanes(mask):
        if shared:
            memory, (offset,) = access.shared_at(w, at[lane : lane + 1], width, "atom", space == ".shared::cluster")
            row = memory.bytes.data[offset : offset + width]
        else:
            row = access.read_global(w.cta, at[lane : lane + 1], width, None, "atom")[0]
        before = row.view(word)
        if other is not None:  # .cas
            after = np.where(before == x[lane], w.full(other)[lane], before).astype(word)
        else:
            after = np.asarray(UPDATES[op](before, x[lane : lane + 1])).astype(word).reshape(1)
        old[lane] = before[0]
        if shared:
            row[:] = after.view(np.uint8)
        else:
            access.write_global(w.cta, at[lane : lane + 1], after.view(np.uint8)[None], None, "atom")
    if not shared:
        order.observe(w, mask, address, acquire=sem in (".acquire", ".acq_rel"))
    return old
