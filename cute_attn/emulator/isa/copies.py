"""ldmatrix, stmatrix and cp.async: rows of matrices between shared memory and registers, and into shared memory."""

from __future__ import annotations

import numpy as np

from cute_attn.emulator import access
from cute_attn.emulator.clocks import ORDER, Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import Divergence, PtxError
from cute_attn.emulator.gang import Gang
from cute_attn.emulator.isa.mma import whole
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.memory import SharedMemory
from cute_attn.emulator.ptx import Imm, Inst

_COUNT = {".x1": 1, ".x2": 2, ".x4": 4}
_SHARED = "{.shared|.shared::cta}"


# --- ldmatrix, stmatrix -----------------------------------------------------------------------------------------------


@form(f"ldmatrix.sync.aligned.m8n8{{.x1|.x2|.x4}}{{|.trans}}{_SHARED}.b16", converges=True, golden="matrix")
def ldmatrix(e: Emitter, inst: Inst, count: str, trans: str, space: str) -> None:
    d, address = inst.operands
    items = e.items(d)
    arguments = f"g, {e.mask}, {e.address(address, wide=False)}, {_COUNT[count]}, {bool(trans)}"
    e.line(f"t = {e.bind(_ldmatrix, 'ldmatrix')}({arguments})")
    for i, item in enumerate(items):
        e.set(item, "u4", f"t[{i}]")


def _row_addresses(g: Gang, address: Array, count: int) -> Array:
    """Addresses of the rows of all matrices: [warps, 8 * count], from the first lanes of each warp."""
    rows: Array = g.full(address).reshape(-1, 32)[:, : 8 * count]
    return rows


def _ldmatrix(g: Gang, mask: Array | None, address: Array, count: int, trans: bool) -> Array:
    whole(g, mask, "ldmatrix")
    rows = _row_addresses(g, address, count)
    if mask is not None:
        rows = rows[mask.reshape(-1, 32)[:, 0]]
        agents = g.agents[mask.reshape(-1, 32)[:, 0]]
    else:
        agents = g.agents
    at = rows.ravel()
    (memory, _), *_ = access.shared_of(g, at, "ldmatrix")
    offsets = access.offsets_of(at)
    memory.check(offsets, 16, 16, "ldmatrix")
    data = memory.load(offsets, 16, np.repeat(agents, 8 * count), "ldmatrix")
    warps = len(agents)
    if trans:
        # lane l gets rows 2 (l % 4) and + 1 of column l / 4
        items = data.view(np.uint16).reshape(warps, count, 4, 2, 8).transpose(1, 0, 4, 2, 3)
        words = np.ascontiguousarray(items).view(np.uint32).reshape(count, -1)
    else:
        words = np.ascontiguousarray(data.view(np.uint32).reshape(warps, count, 32).transpose(1, 0, 2)).reshape(
            count, -1
        )
    if mask is None:
        return words
    out = np.zeros((count, g.size), np.uint32)
    out[:, mask] = words
    return out


@form(f"stmatrix.sync.aligned.m8n8{{.x1|.x2|.x4}}{{|.trans}}{_SHARED}.b16", since=90, converges=True, golden="matrix")
def stmatrix(e: Emitter, inst: Inst, count: str, trans: str, space: str) -> None:
    address, sources = inst.operands
    values = "(" + "".join(f"{e.get(x, 'u4')}, " for x in e.items(sources)) + ")"
    e.call(_stmatrix, [e.address(address, wide=False), values, str(bool(trans))])


def _stmatrix(g: Gang, mask: Array | None, address: Array, sources: tuple[Array, ...], trans: bool) -> None:
    whole(g, mask, "stmatrix")
    count = len(sources)
    present = np.ones(len(g.warps), np.bool_) if mask is None else mask.reshape(-1, 32)[:, 0]
    at = _row_addresses(g, address, count)[present].ravel()
    words = np.stack([g.full(s) for s in sources]).reshape(count, -1, 32)[:, present].transpose(1, 0, 2)
    if trans:
        pairs = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 4, 2)
        rows = np.ascontiguousarray(pairs.transpose(0, 1, 3, 4, 2)).view(np.uint8).reshape(-1, 16)
    else:
        rows = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 16)
    (memory, _), *_ = access.shared_of(g, at, "stmatrix")
    offsets = access.offsets_of(at)
    memory.check(offsets, 16, 16, "stmatrix")
    memory.store(offsets, access.words_of(rows), 16, np.repeat(g.agents[present], 8 * count), "stmatrix")


# --- cp.async ---------------------------------------------------------------------------------------------------------


class Copies:
    """cp.async of one warp: groups committed, oldest first, and the open one."""

    def __init__(self) -> None:
        self.open: list[tuple[SharedMemory, Array, Array, int]] = []
        self.op: Op | None = None
        self.told: list[Op] = []  # of the open group too: those whose end an mbarrier has been told of
        self.committed: list[tuple[list[tuple[SharedMemory, Array, Array, int]], list[Op]]] = []

    @property
    def ops(self) -> list[Op]:
        """Of the open group."""
        return [*self.told, *([] if self.op is None else [self.op])]


def _copies(g: Gang, position: int) -> Copies:
    table = g.cta.extra.setdefault("cp.async", {})
    found = table.get(int(g.warps[position]))
    if found is None:
        found = table[int(g.warps[position])] = Copies()
    copies: Copies = found
    return copies


@form(
    f"cp.async{{.ca|.cg}}{_SHARED}.global{{|.L2::cache_hint}}{{|.L2::64B|.L2::128B|.L2::256B}}",
    golden="copies",
)
def cp_async(e: Emitter, inst: Inst, cache: str, *choices: str) -> None:
    target, source, size, *rest = inst.operands
    if not isinstance(size, Imm) or size.value not in ((16,) if cache == ".cg" else (4, 8, 16)):
        raise PtxError(f"{inst.op} of {size} bytes")
    given = e.get(rest[0], "u4") if rest and ".L2::cache_hint" not in choices else e.constant(size.value, "u4")
    e.call(_cp_async, [e.address(target, wide=False), e.address(source, wide=True), str(size.value), given])


def _cp_async(g: Gang, mask: Array | None, target: Array, source: Array, size: int, given: Array) -> None:
    """`given` bytes are read (0 allows any address), the rest is zeros."""
    lanes = g.lanes(mask)
    wanted = g.full(given)
    if (wanted[lanes] > size).any():
        raise PtxError(f"cp.async: source size above {size}")
    rows = np.zeros((g.size, size), np.uint8)
    active = g.active(mask)
    for count in np.unique(wanted[lanes]):
        if count:
            some = active & (wanted == count)
            part = (
                access.load_global(g, some, source, int(count), "cp.async")
                if count == size
                else _partial(g, some, source, int(count))
            )
            rows[some, : int(count)] = part[some]
    at = g.full(target)[lanes]
    (memory, _), *_ = access.shared_of(g, at, "cp.async")
    offsets = access.offsets_of(at)
    memory.check(offsets, size, size, "cp.async")
    words = access.words_of(rows[lanes])
    owners = g.row[lanes]
    for position in np.unique(owners):
        copies = _copies(g, int(position))
        if copies.op is None:
            copies.op = g.begin_op(int(position), "cp.async", generic=True)
        chosen = owners == position
        copies.open.append((memory, offsets[chosen], words[chosen], size))
        if g.cta.grid.schedule.kind == "eager":
            _land(copies.open.pop(), copies.op)


def _partial(g: Gang, mask: Array, source: Array, count: int) -> Array:
    """A source size that is no whole word: byte by byte."""
    columns = [access.load_global(g, mask, source + np.uint64(i), 1, "cp.async") for i in range(count)]
    return np.concatenate(columns, axis=1)


def _land(copy: tuple[SharedMemory, Array, Array, int], op: Op | None) -> None:
    memory, offsets, words, size = copy
    memory.op_store(offsets, words, size, op, "cp.async", generic=True)


def outstanding(g: Gang, position: int) -> list[Op]:
    """All copies of a warp whose end it has not seen; in a late schedule they land now."""
    copies, clocks = _copies(g, position), g.cta.clocks
    for group, ops in [*copies.committed, (copies.open, copies.ops)]:
        while group:
            _land(group.pop(), ops[-1] if ops else None)
    if clocks is None:
        return []
    seen = clocks.v[g.agents[position], ORDER]
    copies.told, copies.op = [op for op in copies.ops if seen[op.agent] < op.epoch], None
    return [op for _, ops in copies.committed for op in ops] + copies.told


@form("cp.async.commit_group", conformance="order", golden="copies")
def commit_group(e: Emitter, inst: Inst) -> None:
    e.call(_commit, [])


def _warps(g: Gang, mask: Array | None, what: str) -> Array:
    """Positions of the warps that take part, each with all its lanes: groups are kept per warp."""
    if mask is None:
        return np.arange(len(g.warps))
    rows = mask.reshape(-1, 32)
    if (rows.any(axis=1) & ~rows.all(axis=1)).any():
        raise Divergence(f"{what} by some lanes of a warp is not supported")
    return np.flatnonzero(rows.any(axis=1))


def _commit(g: Gang, mask: Array | None) -> None:
    for position in _warps(g, mask, "cp.async.commit_group"):
        copies = _copies(g, int(position))
        copies.committed.append((copies.open, copies.ops))
        copies.open, copies.op, copies.told = [], None, []


@form("cp.async.wait_group", "cp.async.wait_all", conformance="order", golden="copies")
def wait_group(e: Emitter, inst: Inst) -> None:
    if inst.operands:
        e.call(_wait, [str(inst.operands[0].value)])  # type: ignore[union-attr]
    else:
        e.call(_commit, [])
        e.call(_wait, ["0"])


def _wait(g: Gang, mask: Array | None, keep: int) -> None:
    for position in _warps(g, mask, "cp.async.wait_group"):
        copies = _copies(g, int(position))
        while len(copies.committed) > keep:
            group, ops = copies.committed.pop(0)
            for copy in group:
                _land(copy, ops[-1] if ops else None)
            for op in ops:
                assert g.cta.clocks is not None
                g.cta.clocks.acquire(g.agents[position : position + 1], op.clock)
