"""wgmma: asynchronous products of a warpgroup. Results appear when a group is waited for. Until then the accumulator
registers hold a mark that only another wgmma may read."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from cute_attn.emulator import narrow_sums, smem_matrix
from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import EmulatorError, PtxError, RegisterFault
from cute_attn.emulator.formats import DECODERS
from cute_attn.emulator.isa.mma import EIGHT_BITS, a_matrix
from cute_attn.emulator.isa.registry import called, form
from cute_attn.emulator.ptx import Inst, Reg, Vec
from cute_attn.emulator.warp_batch import Split, WarpBatch

_N = "{" + "|".join(f"n{n}" for n in range(8, 257, 8)) + "}"
LATENCY = 128  # of virtual time, for the timeline


class InFlight:
    """Mark in an accumulator register whose product has not been waited for."""

    __slots__ = ("index", "product")

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
    """D = A B (+ D), issued by one batch. `a` is a descriptor, or the matrix that the registers held."""

    n: int
    kinds: tuple[str, str]
    a: smem_matrix.Operand | Array
    b: smem_matrix.Operand
    old: Product | list[Any] | None  # the accumulators, if they count: those of a product, or registers
    op: Op
    clocks: Array  # of each warp at the issue
    marks: list[InFlight] = dataclasses.field(default_factory=list)
    sums: Array | None = None  # D: [warps, 16, n]

    def run(self, w: WarpBatch) -> None:
        if self.sums is not None:
            return
        b = self._load(w, self.b, 0, self.n, self.kinds[1], slice(None))
        a = self._left(w, self.a) if isinstance(self.a, smem_matrix.Operand) else self.a
        old = self._old(w)
        if smem_matrix.ITEM_BYTES[self.kinds[0]] == 1:
            zeros = np.zeros((len(w.warps), 16, self.n), np.float32)
            self.sums = narrow_sums.multiply_add(a, b, zeros if old is None else old)
            return
        # In fp64, as in mma.sync: a row's place in the tile must not matter.
        product = np.matmul(a.astype("f8"), b.T.astype("f8")).astype("f4")
        self.sums = product if old is None else product + old

    def _old(self, w: WarpBatch) -> Array | None:
        """The accumulators that count, like `sums`."""
        if self.old is None or isinstance(self.old, Product):
            return None if self.old is None else self.old.sums
        registers = np.array([w.full(_value_of(x).view(np.float32)) for x in self.old])
        pieces = registers.reshape(self.n // 8, 2, 2, len(w.warps), 8, 4)
        return pieces.transpose(3, 1, 4, 0, 5, 2).reshape(len(w.warps), 16, self.n)

    @functools.cached_property
    def results(self) -> Array:
        """D as [registers, lanes]: lane = 4 (row % 8) + column / 2 % 4; registers run over column pairs, then rows + 8,
        then the next 8 columns.
        """
        assert self.sums is not None
        pieces = self.sums.reshape(-1, 2, 8, self.n // 8, 4, 2)
        return pieces.transpose(3, 1, 5, 0, 2, 4).reshape(self.n // 2, -1)

    def _left(self, w: WarpBatch, operand: smem_matrix.Operand) -> Array:
        """The 16 rows of A of each warp."""
        rows = [16 * int(warp % 4) for warp in w.warps]
        kind = self.kinds[0]
        return np.stack([self._load(w, operand, row, 16, kind, slice(i, i + 1)) for i, row in enumerate(rows)])

    def _load(
        self, w: WarpBatch, operand: smem_matrix.Operand, first: int, rows: int, kind: str, warps: slice
    ) -> Array:
        """Load rows of an operand for these warps of the batch: only what all of them have observed counts."""
        op = dataclasses.replace(self.op, clock=self.clocks[warps].min(axis=0))
        return smem_matrix.load(w.cta.smem, operand, first, rows, kind, op, "wgmma")


class WarpgroupFault(EmulatorError):
    """Warps of a warpgroup that do not issue the same products."""


class Warpgroup:
    """Products issued by four warps: all the same, in the same order, though not at the same time."""

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


def _warpgroup(w: WarpBatch) -> Warpgroup:
    number = int(w.warps[0]) // 4
    return w.cta.unit(f"warpgroup {number}", functools.partial(Warpgroup, number), Warpgroup.close)


def _value_of(x: Any) -> Array:
    """Value of an accumulator register; for a mark, the result of its product."""
    return x.product.results[x.index] if isinstance(x, InFlight) else x


# --- forms ------------------------------------------------------------------------------------------------------------


_HOPPER: dict[str, Any] = {"since": 90, "only": (90,)}
_PRODUCT: dict[str, Any] = {"aligned": "wgmma", **_HOPPER}


@called("wgmma.fence.sync.aligned", solo=True, aligned="wgmma.fence", **_HOPPER)
def fence(w: WarpBatch, mask: Array | None) -> None:
    """Allow the products that follow to use registers as they are now."""
    groups = w.warps // 4
    if len(np.unique(groups)) > 1:
        raise Split([np.flatnonzero(groups == group) for group in np.unique(groups)])
    w.wgmma_fenced, w.wgmma_fenced_ids = list(w.R), None
    w.before_split = _complete_all


@form(f"wgmma.mma_async.sync.aligned.m64{_N}k16.f32{{.f16.f16|.bf16.bf16}}", **_PRODUCT)
@form(f"wgmma.mma_async.sync.aligned.m64{_N}k32.f32{EIGHT_BITS}", **_PRODUCT)
def product(e: Emitter, inst: Inst, n: str, types: str) -> None:
    d, a, b, keep, *rest = inst.operands
    kinds = tuple(types[1:].split("."))
    sign_a, sign_b, *majors = [e.number(inst, x) for x in rest]
    if (sign_a, sign_b) != (1, 1):
        raise PtxError(f"{inst.op} of negated operands is not supported")
    major_a, major_b = [0] * (2 - len(majors)) + majors  # of operands in shared memory, if they have 16 bits
    in_registers = isinstance(a, Vec)
    indices, fragments = ([x.index for x in e.items(operand) if isinstance(x, Reg)] for operand in (d, a))
    if len(indices) != int(n[1:]) // 2:
        raise PtxError(f"{inst.op} with {len(indices)} accumulators")
    majors_are = bool(major_a), bool(major_b)
    how = e.bind((int(n[1:]), kinds, majors_are, indices, fragments, inst), "wgmma")
    left = e.values(a, "u4") if in_registers else e.get(a, "u8")
    e.call(_issue, [how, left, e.get(b, "u8"), e.get(keep, "p")])


def _issue(w: WarpBatch, mask: Array | None, how: tuple[Any, ...], a: Any, b: Array, keep: Array) -> None:
    n, kinds, majors, indices, fragments, inst = how
    if not w.wgmma_fenced:
        raise RegisterFault("wgmma.mma_async without a wgmma.fence before it")
    _warpgroup(w).issue(w.warps[w.row[w.first_lanes(mask)]], inst)
    registers = [w.R[i] for i in indices]
    chained = _is_product(registers)
    if not chained:
        _check_fenced(w, _changed(w, indices))
    if isinstance(a, tuple):
        _check_fenced(w, [x if x.base is None else x.base for x in _changed(w, fragments)])
        left: Any = a_matrix(w, a, DECODERS[kinds[0]])
    else:
        left = smem_matrix.hopper(w.uniform(a, mask, "matrix descriptor"), majors[0])
    right = smem_matrix.hopper(w.uniform(b, mask, "matrix descriptor"), majors[1])
    accumulate = bool(w.uniform(keep, mask, "scale-d"))
    seen = w.cta.clocks.v[w.agents].copy()
    op = w.begin_op(0, "wgmma")
    old = None if not accumulate else registers[0].product if chained else registers
    seen[:, :, op.agent] = op.epoch
    w.cta.clocks.go_on(w.agents[1:])
    product = Product(n, kinds, left, right, old, op, seen)
    product.marks = [InFlight(product, position) for position in range(len(indices))]
    for index, mark in zip(indices, product.marks, strict=True):
        w.R[index] = mark
    w.wgmma_groups[-1].append(product)


def _is_product(registers: list[Any]) -> bool:
    """Whether these are all the marks of one product, in their order."""
    first = registers[0]
    if type(first) is not InFlight:
        return False
    marks = first.product.marks
    return len(registers) == len(marks) and all(map(operator.is_, registers, marks))


def _changed(w: WarpBatch, registers: list[int]) -> list[Array]:
    """Values of those registers that hold others than at the last wgmma.fence, if not of a product."""
    return [w.R[i] for i in registers if w.R[i] is not w.wgmma_fenced[i] and type(w.R[i]) is not InFlight]


def _check_fenced(w: WarpBatch, values: list[Array]) -> None:
    """Check that some register held each of these values at the last wgmma.fence."""
    if any(id(x) not in _ids(w) for x in values):
        raise RegisterFault("a register of wgmma.mma_async was changed after the last wgmma.fence")


def _ids(w: WarpBatch) -> set[int]:
    if w.wgmma_fenced_ids is None:
        w.wgmma_fenced_ids = {id(x) for x in w.wgmma_fenced}
        w.wgmma_fenced_ids |= {id(x.base) for x in w.wgmma_fenced if isinstance(x, np.ndarray) and x.base is not None}
    return w.wgmma_fenced_ids


@called("wgmma.commit_group.sync.aligned", **_HOPPER)
def commit(w: WarpBatch, mask: Array | None) -> None:
    w.wgmma_groups.append([])


@called("wgmma.wait_group.sync.aligned", operands="#", converges=True, **_HOPPER)
def wait(w: WarpBatch, mask: Array | None, keep: int) -> None:
    """Complete committed groups, oldest first, until `keep` are left."""
    finished: list[Product] = []
    while len(w.wgmma_groups) - 1 > keep:
        finished += w.wgmma_groups.pop(0)
    if finished:
        _complete(w, finished)


def _complete_all(w: WarpBatch) -> None:
    """Complete all products before the batch splits: a product belongs to all of its warps."""
    if any(w.wgmma_groups):
        _complete(w, [product for group in w.wgmma_groups for product in group])
        w.wgmma_groups = [[]]


def _complete(w: WarpBatch, products: list[Product]) -> None:
    """Compute products and replace the marks of their accumulator registers by the results."""
    clocks = w.cta.clocks
    for product in products:
        product.run(w)
        clocks.acquire(w.agents, product.op.clock)
        clocks.time[w.agents] = np.maximum(clocks.time[w.agents], product.op.time + LATENCY)
    done = {id(product) for product in products}
    for i in _marked(w.R):
        if id(w.R[i].product) in done:
            w.R[i] = _value_of(w.R[i]).view(w.cta.grid.home_of(i))
    for product in products:  # break the cycle of product and marks, which only the cyclic collector would free
        product.marks, product.old = [], None


def _marked(registers: list[Any]) -> Iterator[int]:
    """Find the registers that hold a mark, few of thousands: a loop over all of them takes four times as long."""
    kinds, at = list(map(type, registers)), -1
    for _ in range(kinds.count(InFlight)):
        at = kinds.index(InFlight, at + 1)
        yield at
