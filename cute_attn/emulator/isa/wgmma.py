"""wgmma: asynchronous products of a warpgroup. Results appear when a group is waited for; until then the accumulator
registers hold a mark that nothing but another wgmma may read."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import numpy as np

from cute_attn.emulator import narrow_sums, smem_matrix
from cute_attn.emulator.clocks import ORDER, Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import EmulatorError, PtxError
from cute_attn.emulator.gang import Gang, Split
from cute_attn.emulator.isa.floats import pack16
from cute_attn.emulator.isa.mma import DECODERS, Decode, a_matrix, whole
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.ptx import Inst, Reg, Vec

_N = "{" + "|".join(f"n{n}" for n in range(8, 257, 8)) + "}"
LATENCY = 128  # of virtual time, for the timeline


class RegisterFault(EmulatorError):
    """A register is used while a product owns it."""


class InFlight:
    """What an accumulator register holds until its product is waited for."""

    def __init__(self, product: Product, index: int) -> None:
        self.product, self.index = product, index

    def __getattr__(self, name: str) -> NoReturn:
        raise RegisterFault("a register of a wgmma in flight is used before wgmma.wait_group")

    def _refuse(self, *args: object) -> NoReturn:
        raise RegisterFault("a register of a wgmma in flight is used before wgmma.wait_group")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __array__ = __array_function__ = __array_ufunc__ = _refuse


@dataclasses.dataclass
class Product:
    """D = A B (+ D) of one gang. `a`: a descriptor, or the matrix that registers held."""

    n: int
    k_bytes: int
    decoders: tuple[Decode, Decode]
    item_bytes: int
    a: smem_matrix.Operand | Array
    b: smem_matrix.Operand
    signs: tuple[int, int]
    half: bool  # accumulators are pairs of f16
    old: list[Any] | None  # accumulator registers, if they count
    op: Op | None
    results: list[Array] | None = None

    def run(self, g: Gang) -> None:
        if self.results is not None:
            return
        b = self._load(g, self.b, 0, self.n, self.decoders[1], self._common(g))
        if isinstance(self.a, smem_matrix.Operand):
            left = [
                self._load(g, self.a, 16 * int(warp % 4), 16, self.decoders[0], self._of(g, i))
                for i, warp in enumerate(g.warps)
            ]
            a = np.stack(left)
        else:
            a = self.a
        if self.item_bytes == 1 and not self.half:
            self.results = self._narrow(g, self.signs[0] * a, self.signs[1] * b)
            return
        product = np.matmul(self.signs[0] * a, self.signs[1] * b.T)  # [warps, 16, n]
        self.results = self._added(g, self._spread(g, product))

    def _spread(self, g: Gang, product: Array) -> Array:
        """[registers, lanes]: lane = 4 (row % 8) + column / 2 % 4; registers: column pairs, then rows + 8, then the
        next 8 columns.
        """
        warps = len(g.warps)
        pieces = product.reshape(warps, 2, 8, self.n // 8, 4, 2)
        return pieces.transpose(3, 1, 5, 0, 2, 4).reshape(self.n // 2, g.size)

    def _gathered(self, g: Gang, registers: Array) -> Array:
        """Inverse of `_spread`."""
        warps = len(g.warps)
        pieces = registers.reshape(self.n // 8, 2, 2, warps, 8, 4)
        return pieces.transpose(3, 1, 4, 0, 5, 2).reshape(warps, 16, self.n)

    def _narrow(self, g: Gang, a: Array, b: Array) -> list[Array]:
        old = np.zeros((len(g.warps), 16, self.n), np.float32)
        if self.old is not None:
            settled = np.stack([g.full(_settled(x)).view(np.float32) for x in self.old])
            old = self._gathered(g, settled)
        return list(self._spread(g, narrow_sums.multiply_add(a, b, old)))

    def _added(self, g: Gang, spread: Array) -> list[Array]:
        olds = None if self.old is None else [_settled(x) for x in self.old]
        if not self.half:
            values: list[Array] = list(spread.astype(np.float32))
            return [v if olds is None else v + olds[i].view(np.float32) for i, v in enumerate(values)]
        found = []
        for i in range(0, len(spread), 2):
            low, high = spread[i], spread[i + 1]
            if olds is not None:
                halves = np.ascontiguousarray(g.full(olds[i // 2])).view(np.float16).astype(np.float32)
                low, high = low + halves[0::2], high + halves[1::2]
            found.append(pack16(low.astype(np.float16), high.astype(np.float16)))
        return found

    def _load(
        self, g: Gang, operand: smem_matrix.Operand, first: int, rows: int, decode: Decode, op: Op | None
    ) -> Array:
        where = smem_matrix.offsets(operand, first, rows, self.k_bytes, self.item_bytes)
        flat = where.ravel()
        g.cta.smem.check(flat, 16, 16, "wgmma operand")
        chunks = g.cta.smem.op_load(flat, 16, op, "wgmma").reshape(where.shape)
        raw = smem_matrix.matrix(chunks, operand, self.item_bytes)
        return decode(np.ascontiguousarray(raw)).reshape(raw.shape)

    def _of(self, g: Gang, position: int) -> Op | None:
        """The operation as seen by the warp that reads its own rows of A."""
        return None if self.op is None else dataclasses.replace(self.op, clock=self.clocks[position])

    def _common(self, g: Gang) -> Op | None:
        """As all warps together: what only some of them know of does not count."""
        return None if self.op is None else dataclasses.replace(self.op, clock=self.clocks.min(axis=0))

    clocks: Any = None


class WarpgroupFault(EmulatorError):
    """The warps of a warpgroup do not issue the same products."""


class Warpgroup:
    """What four warps issue: each the same, in the same order, though not at the same time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.issued: list[Inst] = []
        self.places = dict.fromkeys(range(4 * number, 4 * number + 4), 0)  # by warp

    def issue(self, warps: Array, instruction: Inst) -> None:
        for warp in map(int, warps):
            place = self.places[warp]
            if place == len(self.issued):
                self.issued.append(instruction)
            elif self.issued[place] is not instruction:
                raise WarpgroupFault(f"wgmma: warp {warp} issues another product than its warpgroup's other warps")
            self.places[warp] = place + 1

    def close(self) -> None:
        behind = [warp for warp, place in self.places.items() if place < len(self.issued)]
        if behind:
            raise WarpgroupFault(f"wgmma: warps {behind} have not issued all products of warpgroup {self.number}")


def _warpgroup(g: Gang) -> Warpgroup:
    number = int(g.warps[0]) // 4
    found: Warpgroup | None = g.cta.extra.get(f"warpgroup {number}")
    if found is None:
        found = g.cta.extra[f"warpgroup {number}"] = Warpgroup(number)
        g.cta.closing.append(found.close)
    return found


def _settled(x: Any) -> Array:
    """The value of an accumulator: that of the product before, if it is one."""
    if isinstance(x, InFlight):
        results = object.__getattribute__(x, "product").results
        assert results is not None
        value: Array = results[object.__getattribute__(x, "index")]
        return value
    found: Array = x
    return found


# --- forms ------------------------------------------------------------------------------------------------------------


@form("wgmma.fence.sync.aligned", since=90, only=(90,), solo=True, converges=True, conformance="order", golden="wgmma")
def fence(e: Emitter, inst: Inst) -> None:
    e.call(_fence, [])


def _fence(g: Gang, mask: Array | None) -> None:
    """Registers as they are now may be used by the products that follow."""
    whole(g, mask, "wgmma.fence")
    groups = g.warps // 4
    if len(np.unique(groups)) > 1:
        raise Split([np.flatnonzero(groups == group) for group in np.unique(groups)])
    g.fenced, g.fenced_ids = list(g.R), None
    if not g.groups:
        g.groups = [[]]


@form(
    f"wgmma.mma_async.sync.aligned.m64{_N}k16{{.f32|.f16}}{{.f16.f16|.bf16.bf16}}",
    since=90,
    only=(90,),
    conformance="approx",
    golden="wgmma",
    converges=True,
)
def product_16bit(e: Emitter, inst: Inst, n: str, to: str, kinds: str) -> None:
    kind = "." + kinds.split(".")[1]
    _product(e, inst, int(n[1:]), to, (kind, kind), 2)


@form(
    f"wgmma.mma_async.sync.aligned.m64{_N}k32{{.f32|.f16}}{{.e4m3|.e5m2}}{{.e4m3|.e5m2}}",
    since=90,
    only=(90,),
    conformance="approx",
    golden="wgmma",
    converges=True,
)
def product_8bit(e: Emitter, inst: Inst, n: str, to: str, a: str, b: str) -> None:
    _product(e, inst, int(n[1:]), to, (a, b), 1)


def _product(e: Emitter, inst: Inst, n: int, to: str, kinds: tuple[str, str], item_bytes: int) -> None:
    d, a, b, scale_d, *rest = inst.operands
    from_registers = isinstance(a, Vec)
    immediates = [x.value for x in rest]  # type: ignore[union-attr]
    signs, majors = tuple(immediates[:2]), immediates[2:]
    if item_bytes == 2:
        major_a, major_b = (0, majors[0]) if from_registers else majors
    else:
        major_a = major_b = 0
    indices = [x.index for x in e.items(d) if isinstance(x, Reg)]
    half = to == ".f16"
    if len(indices) != (n // 4 if half else n // 2):
        raise PtxError(f"{inst.op} with {len(indices)} accumulators")
    decoders = (DECODERS[kinds[0]], DECODERS[kinds[1]])
    how = e.bind((n, decoders, item_bytes, signs, (bool(major_a), bool(major_b)), half, indices, inst), "wgmma")
    words = [e.get(x, "u4") for x in e.items(a)] if from_registers else []
    left = f"({', '.join(words)})" if from_registers else e.get(a, "u8")
    keep = e.get(scale_d, "p")
    e.call(_issue, [how, left, e.get(b, "u8"), keep])


def _issue(g: Gang, mask: Array | None, how: tuple[Any, ...], a: Any, b: Array, keep: Array) -> None:
    n, decoders, item_bytes, signs, majors, half, indices, inst = how
    whole(g, mask, "wgmma")
    if g.fenced is None:
        raise RegisterFault("wgmma.mma_async without a wgmma.fence before it")
    _warpgroup(g).issue(g.warps[g.row[g.first_lanes(mask)]], inst)
    R: list[Any] = g.R  # noqa: N806
    _check_fenced(g, [R[i] for i in indices])
    if isinstance(a, tuple):
        _check_fenced(g, [x.base if x.base is not None else x for x in a])
        left: Any = a_matrix(g, a, decoders[0])
    else:
        left = smem_matrix.hopper(g.uniform(a, mask, "matrix descriptor"), majors[0])
    right = smem_matrix.hopper(g.uniform(b, mask, "matrix descriptor"), majors[1])
    accumulate = bool(g.uniform(keep, mask, "scale-d"))
    clocks = g.cta.clocks
    seen = None if clocks is None else clocks.v[g.agents].copy()
    op = g.begin_op(0, "wgmma")
    product = Product(
        n, 32, decoders, item_bytes, left, right, signs, half, [R[i] for i in indices] if accumulate else None, op
    )
    if op is not None and seen is not None and clocks is not None:
        seen[:, :, op.agent] = op.epoch
        product.clocks = seen
        clocks.v[g.agents[1:], ORDER, g.agents[1:]] += 1
    for position, index in enumerate(indices):
        R[index] = InFlight(product, position)
    g.groups[-1].append(product)


def _check_fenced(g: Gang, values: list[Any]) -> None:
    """Registers of a product were written before the last wgmma.fence, or by products."""
    assert g.fenced is not None
    unknown = [x for x in values if not isinstance(x, InFlight) and id(x) not in _ids(g)]
    if unknown:
        raise RegisterFault("a register of wgmma.mma_async was changed after the last wgmma.fence")


def _ids(g: Gang) -> set[int]:
    if g.fenced_ids is None:
        assert g.fenced is not None
        g.fenced_ids = {id(x) for x in g.fenced}
        g.fenced_ids |= {id(x.base) for x in g.fenced if isinstance(x, np.ndarray) and x.base is not None}
    return g.fenced_ids


@form("wgmma.commit_group.sync.aligned", since=90, only=(90,), conformance="order", golden="wgmma")
def commit(e: Emitter, inst: Inst) -> None:
    e.call(_commit, [])


def _commit(g: Gang, mask: Array | None) -> None:
    if not g.groups:
        g.groups = [[]]
    g.groups.append([])


@form("wgmma.wait_group.sync.aligned", since=90, only=(90,), conformance="order", golden="wgmma", converges=True)
def wait(e: Emitter, inst: Inst) -> None:
    e.call(_wait, [str(inst.operands[0].value)])  # type: ignore[union-attr]


def _wait(g: Gang, mask: Array | None, keep: int) -> None:
    """Groups complete in order; those not committed do not count."""
    finished: list[Product] = []
    while len(g.groups) - 1 > keep:
        finished += g.groups.pop(0)
    if finished:
        complete(g, finished)


def complete(g: Gang, products: list[Product]) -> None:
    """Run products and put their results into every register that waits for one."""
    clocks = g.cta.clocks
    for product in products:
        product.run(g)
        if product.op is not None and clocks is not None:
            clocks.acquire(g.agents, product.op.clock)
            clocks.time[g.agents] = np.maximum(clocks.time[g.agents], product.op.time + LATENCY)
    done = {id(product) for product in products}
    R: list[Any] = g.R  # noqa: N806
    for i, value in enumerate(R):
        if type(value) is InFlight and id(object.__getattribute__(value, "product")) in done:
            home = g.cta.grid.home_of(i)
            R[i] = _settled(value).view(home)
