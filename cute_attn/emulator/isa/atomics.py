"""atom and red on global and shared memory, lane by lane in ascending order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.dtypes import DTYPES, Array, tag
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.isa import order
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst
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


@form(
    f"{{atom|red|red.async}}{_ORDER}{_SPACE}{_INTEGER_OPS}",
    f"{{atom}}{_ORDER}{_SPACE}{{.cas}}{{.b32|.u32|.b64|.u64}}",
    golden="atomics",
)
@form(
    f"{{atom|red}}{_ORDER}{_SPACE}{{.add}}{{.f32|.f64}}",
    conformance="approx",
    golden="atomics",
)
def atomic(e: Emitter, inst: Inst, word: str, sem: str, scope: str, space: str, op: str, kind: str) -> None:
    t = tag(kind)
    results = [(inst.operands[0], t)] if word == "atom" else []
    address, *values = inst.operands[len(results) :]
    name = e.bind((UPDATES.get(op), DTYPES[t], sem, space), "atomic")
    at = e.address(address, wide=not space.startswith(".shared"))
    e.call(_atomic, [name, at, *(e.get(value, t) for value in values)], results)


def _atomic(
    w: WarpBatch, mask: Array | None, how: tuple[Update | None, np.dtype, str, str], address: Array, *values: Array
) -> Array:  # type: ignore[type-arg]
    update, dtype, sem, space = how
    width = dtype.itemsize
    old, at, operands = np.zeros(w.size, dtype), w.full(address), [w.full(v) for v in values]
    shared = space.startswith(".shared")
    if not shared:
        access.check_aligned(at[w.lanes(mask)], width, "atom")
        order.publish(w, mask, address, release=sem in (".release", ".acq_rel"))
    for lane in w.lanes(mask):
        if shared:
            row = _shared_word(w, int(at[lane]), width, space == ".shared::cluster")
        else:
            row = access.read_global(w.cta, at[lane : lane + 1], width, None, "atom")[0]
        before = row.view(dtype)
        if update is None:
            after = np.where(before == operands[0][lane], operands[1][lane], before).astype(dtype)
        else:
            after = np.asarray(update(before, operands[0][lane : lane + 1])).astype(dtype).reshape(1)
        old[lane] = before[0]
        if shared:
            row[:] = after.view(np.uint8)
        else:
            access.write_global(w.cta, at[lane : lane + 1], after.view(np.uint8)[None], None, "atom")
    if not shared:
        order.observe(w, mask, address, acquire=sem in (".acquire", ".acq_rel"))
    return old


def _shared_word(w: WarpBatch, address: int, width: int, cluster: bool) -> Array:
    """View of a shared word. Atomics on shared memory are unordered with one another and are not checked for races."""
    memory, (offset,) = access.shared_at(w, np.array([address], np.uint32), width, "atom", cluster)
    return memory.bytes.data[offset : offset + width]
