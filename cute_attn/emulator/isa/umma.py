"""tcgen05.mma, cp and commit: issued by one thread, executed by the tensor cores of one CTA or of a CTA pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator import smem_matrix, umma
from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import MemoryFault, PtxError
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.registry import form
from cute_attn.emulator.isa.tmem import ARCHS, GROUP, memory_of, pair_of
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.ptx import Addr, Imm, Inst, Vec
from cute_attn.emulator.tensor_memory import split_address
from cute_attn.emulator.warp_batch import WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 300  # of virtual time, for the timeline
KIND = "tcgen05.mma"  # the stream of products and copies of a thread
SCALE_ADDRESS = (1 << 30) - 1  # bits above may select a byte of the word
_COLLECTOR = "{|.collector::a::fill|.collector::a::use|.collector::a::lastuse|.collector::a::discard}"
_USES = ("fill", "use", "lastuse", "discard")
_WS_COLLECTOR = "{|" + "|".join(f".collector::b{i}::{use}" for i in range(4) for use in _USES) + "}"


# --- products ---------------------------------------------------------------------------------------------------------


@dataclass
class _Product:
    """One tcgen05.mma. `a` is an address in tensor memory or a matrix descriptor."""

    kind: umma.Kind
    what: umma.Instruction
    d: int
    a: int
    a_in_tmem: bool
    b: int
    keep: bool
    shift: int = 0
    disabled: int = 0  # one bit per lane, even CTA first
    a_scales: int = 0
    b_scales: int = 0

    def run(self, ctas: list[Cta], op: Op | None) -> None:
        x, kind = self.what, self.kind
        group = kind.group
        right = np.concatenate([self._shared(cta, self.b, x.n // group, x.b_mn_major, x.b_type, op) for cta in ctas])
        if x.b_negated:
            right = -right
        for rank, cta in enumerate(ctas):
            rows = umma.rows_of(x, group)
            left = (
                self._tmem_a(cta, op) if self.a_in_tmem else self._shared(cta, self.a, rows, x.a_mn_major, x.a_type, op)
            )
            if x.a_negated:
                left = -left
            if kind.vector:
                left = self._scaled(left, self._scales(cta, self.a_scales, rows, x.a_scale_id, op))
                product = left @ self._scaled(right, self._b_scales(cta, op)).T
            else:
                product = left @ right.T
            self._write(cta, rank, product, op)

    def _shared(self, cta: Cta, descriptor: int, rows: int, mn_major: bool, type_: str, op: Op | None) -> Array:
        """Load an operand from shared memory of one CTA: [rows, k]."""
        operand = smem_matrix.blackwell(descriptor, mn_major)
        if operand.wide != (mn_major and self.kind.item_bytes == 4):
            raise PtxError("32-bit items that are MN-major, and only they, need the swizzle of 32-byte units")
        where = smem_matrix.offsets(operand, 0, rows, umma.K_BYTES, self.kind.item_bytes)
        flat = where.ravel()
        cta.smem.check(flat, 16, 16, "tcgen05.mma operand")
        chunks = cta.smem.op_load(flat, 16, op, "tcgen05.mma").reshape(where.shape)
        raw = np.ascontiguousarray(smem_matrix.matrix(chunks, operand, self.kind.item_bytes))
        return umma.values(raw, self.kind, type_)

    def _tmem_a(self, cta: Cta, op: Op | None) -> Array:
        x, group = self.what, self.kind.group
        if x.a_mn_major:
            raise PtxError("A in tensor memory cannot be transposed")
        lane, column = split_address(self.a)
        lanes = umma.lanes_of(x, group, lane)
        words = memory_of(cta).load(lanes, column + np.arange(umma.A_COLUMNS), op, "tcgen05.mma (A)")
        rows = umma.rows_of(x, group)
        if len(lanes) > rows and not (words[:rows] == words[rows:]).all():
            raise MemoryFault("A in tensor memory: lanes 64..127 must repeat lanes 0..63 where each CTA has 64 rows")
        raw = np.ascontiguousarray(words[:rows]).view(f"u{self.kind.item_bytes}")
        return umma.contained(raw, self.kind, x.a_type)

    def _write(self, cta: Cta, rank: int, product: Array, op: Op | None) -> None:
        x, group = self.what, self.kind.group
        memory = memory_of(cta)
        lane, column = split_address(self.d)
        lanes = umma.lanes_of(x, group, lane)
        folded = umma.fold(product, x, group)
        columns = column + np.arange(folded.shape[1])
        before = memory.load(lanes, columns, op, "tcgen05.mma (D)") if self.keep else None
        words = umma.accumulate(folded, before, x, self.shift)
        if self.disabled:
            kept = np.array([not self.disabled >> (128 * rank + int(at)) & 1 for at in lanes])
            lanes, words = lanes[kept], words[kept]
        if len(lanes):
            memory.store(lanes, columns, words, op, "tcgen05.mma (D)")

    # Scale factors: the same in every quarter of the lanes; for B where each CTA of a pair has 64 rows, the upper half
    # of the lanes holds those of the right half of D.

    def _scales(self, cta: Cta, address: int, rows: int, first: int, op: Op | None, half: int | None = None) -> Array:
        lane, column = split_address(address & SCALE_ADDRESS)
        if lane % 32:
            raise PtxError(f"scale factors at lane {lane} of tensor memory")
        count = self.kind.k // self.kind.vector
        columns = column + np.arange(umma.scale_columns(rows))
        quarters = range(4) if half is None else range(2 * half, 2 * half + 2)
        found = []
        for quarter in quarters:
            lanes: Array = 32 * quarter + np.arange(32)
            if rows < 32:
                lanes = lanes[:rows]
            words = memory_of(cta).load(lanes, columns, op, "tcgen05.mma (scale factors)")
            found.append(umma.scales(words, rows, first, count, self.what.scale_type))
        if any(not np.array_equal(found[0], other, equal_nan=True) for other in found[1:]):
            raise MemoryFault("scale factors differ between the quarters of the lanes of tensor memory")
        return found[0]

    def _b_scales(self, cta: Cta, op: Op | None) -> Array:
        x = self.what
        if umma.rows_of(x, self.kind.group) == 64:
            halves = [self._scales(cta, self.b_scales, x.n // 2, x.b_scale_id, op, half) for half in (0, 1)]
            return np.concatenate(halves)
        return self._scales(cta, self.b_scales, x.n, x.b_scale_id, op)

    def _scaled(self, matrix: Array, factors: Array) -> Array:
        result: Array = matrix * np.repeat(factors, self.kind.vector, axis=1)
        return result


@form(
    f"tcgen05.mma{GROUP}{{.kind::f16|.kind::tf32|.kind::f8f6f4}}{_COLLECTOR}",
    since=100,
    only=ARCHS,
    conformance="unverified",
)
def product(e: Emitter, inst: Inst, group: str, kind: str, collector: str) -> None:
    """Emit a product. The collector buffer, which may keep A, does not change values."""
    d, a, b, word, *rest = inst.operands
    disabled = "()"
    if isinstance(rest[0], Vec):
        items = rest.pop(0).items  # type: ignore[union-attr]
        if len(items) != 4 * int(group[-1]):
            raise PtxError(f"{inst.op} with {len(items)} registers of disabled lanes")
        disabled = "(" + "".join(f"{e.get(x, 'u4')}, " for x in items) + ")"
    shift = 0
    if len(rest) > 1:
        if not isinstance(rest[1], Imm) or not 0 <= rest[1].value <= 15 or kind not in (".kind::f16", ".kind::tf32"):
            raise PtxError(f"{inst.op} with scale-input-d {rest[1]}")
        shift = rest[1].value
    how = umma.Kind(kind.removeprefix(".kind::"), int(group[-1]))
    in_tmem = isinstance(a, Addr)
    left = e.address(a, wide=False) if in_tmem else e.get(a, "u8")
    fixed = [e.bind(how, "kind"), str(in_tmem), str(shift)]
    e.call(
        _issue,
        [*fixed, e.address(d, wide=False), left, e.get(b, "u8"), e.get(word, "u4"), e.get(rest[0], "p"), disabled],
    )


@form(f"tcgen05.mma{GROUP}{{.kind::i8}}{_COLLECTOR}", since=100, only=(100,), conformance="unverified")
def integer_product(e: Emitter, inst: Inst, group: str, kind: str, collector: str) -> None:
    product(e, inst, group, kind, collector)


@form(
    f"tcgen05.mma.ws.cta_group::1{{.kind::f16|.kind::tf32|.kind::f8f6f4}}{_WS_COLLECTOR}",
    since=100,
    only=ARCHS,
    conformance="unverified",
)
def stationary_product(e: Emitter, inst: Inst, kind: str, collector: str) -> None:
    """Emit a product with stationary weights. The collector buffers, which may keep B, do not change values."""
    d, a, b, word, keep, *zeros = inst.operands
    how = umma.Kind(kind.removeprefix(".kind::"), 1, stationary=True)
    in_tmem = isinstance(a, Addr)
    left = e.address(a, wide=False) if in_tmem else e.get(a, "u8")
    if zeros:
        e.call(_check_zero_columns, [e.get(zeros[0], "u8")])
    operands = [e.address(d, wide=False), left, e.get(b, "u8"), e.get(word, "u4"), e.get(keep, "p")]
    e.call(_issue, [e.bind(how, "kind"), str(in_tmem), "0", *operands, "()"])


@form(f"tcgen05.mma.ws.cta_group::1{{.kind::i8}}{_WS_COLLECTOR}", since=100, only=(100,), conformance="unverified")
def stationary_integer_product(e: Emitter, inst: Inst, kind: str, collector: str) -> None:
    stationary_product(e, inst, kind, collector)


def _check_zero_columns(w: WarpBatch, mask: Array | None, descriptor: Array) -> None:
    """Refuse zero-column masks, whose table and examples in the ISA contradict each other, and shifts."""
    for lane in w.lanes(mask):
        value = int(w.full(descriptor)[lane])
        if value >> 39 & 1 or value >> 56 & 63:
            raise PtxError(f"the zero-column mask descriptor {value:#x} is not supported, only that of no mask is")


_VECTORS = {
    ("mxf8f6f4", ""): 32,
    ("mxf8f6f4", ".scale_vec::1X"): 32,
    ("mxf8f6f4", ".block32"): 32,
    ("mxf4", ""): 32,
    ("mxf4", ".scale_vec::2X"): 32,
    ("mxf4", ".block32"): 32,
    ("mxf4nvf4", ".scale_vec::2X"): 32,
    ("mxf4nvf4", ".block32"): 32,
    ("mxf4nvf4", ".scale_vec::4X"): 16,
    ("mxf4nvf4", ".block16"): 16,
}


@form(
    f"tcgen05.mma{GROUP}{{.kind::mxf8f6f4|.kind::mxf4|.kind::mxf4nvf4}}.block_scale"
    f"{{|.scale_vec::1X|.scale_vec::2X|.scale_vec::4X|.block16|.block32}}{_COLLECTOR}",
    since=100,
    only=ARCHS,
    conformance="unverified",
)
def scaled_product(e: Emitter, inst: Inst, group: str, kind: str, vector: str, collector: str) -> None:
    name = kind.removeprefix(".kind::")
    if (name, vector) not in _VECTORS:
        raise PtxError(f"{inst.op}: {name} has no {vector or 'default'} scales")
    d, a, b, word, a_scales, b_scales, keep = inst.operands
    how = umma.Kind(name, int(group[-1]), _VECTORS[name, vector])
    in_tmem = isinstance(a, Addr)
    left = e.address(a, wide=False) if in_tmem else e.get(a, "u8")
    fixed = [e.bind(how, "kind"), str(in_tmem), "0"]
    scales = [e.address(x, wide=False) for x in (a_scales, b_scales)]
    operands = [e.address(d, wide=False), left, e.get(b, "u8"), e.get(word, "u4"), e.get(keep, "p")]
    e.call(_issue, [*fixed, *operands, "()", *scales])


def _issue(
    w: WarpBatch,
    mask: Array | None,
    kind: umma.Kind,
    in_tmem: bool,
    shift: int,
    d: Array,
    a: Array,
    b: Array,
    word: Array,
    keep: Array,
    disabled: tuple[Array, ...],
    *scales: Array,
) -> None:
    pair = pair_of(w.cta, kind.group)
    for lane in w.lanes(mask):
        at = [int(w.full(x)[lane]) for x in (d, a, b, *scales)]
        lanes_off = sum(int(w.full(x)[lane]) << (32 * i) for i, x in enumerate(disabled))
        what = umma.decode(int(w.full(word)[lane]), kind)
        umma.check_tensor_memory(what, kind, at[0], at[1] if in_tmem else None)
        one = _Product(kind, what, at[0], at[1], in_tmem, at[2], bool(w.full(keep)[lane]), shift, lanes_off, *at[3:])
        op = memory_of(w.cta).begin(int(w.lane_agents[lane]), KIND, int(w.lane[lane]))
        w.cta.post(lambda one=one, op=op: one.run(pair, op), _queue(w, int(lane)))  # type: ignore[misc]


def _queue(w: WarpBatch, lane: int) -> str:
    """Name of a thread's queue, which keeps its products, copies and commits in order."""
    return f"{KIND} {int(w.lane_agents[lane])} {int(w.lane[lane])}"


# --- copies from shared memory ----------------------------------------------------------------------------------------

_COPIES = {
    # rows, bytes of a row, where row r goes: lanes
    ".128x256b": (128, 32, lambda r: [r]),
    ".128x128b": (128, 16, lambda r: [r]),
    ".64x128b.warpx2::02_13": (64, 16, lambda r: [r, r + 64]),
    ".64x128b.warpx2::01_23": (64, 16, lambda r: [r % 32 + 64 * (r // 32), r % 32 + 64 * (r // 32) + 32]),
    ".32x128b.warpx4": (32, 16, lambda r: [r, r + 32, r + 64, r + 96]),
}


_UNPACK = {
    "": lambda units: units,
    # 16 bytes each: 16 items of 4 or 6 bits, then padding. Where the ISA shows bytes in figures only, they are taken to
    # be those that products take A from tensor memory in: e2m1 in bits 2 to 5, formats of 6 bits in bits 0 to 5.
    ".b8x16.b4x16_p64": lambda units: umma.unpadded(units, 4) << 2,
    ".b8x16.b6x16_p32": lambda units: umma.unpadded(units, 6),
}


@form(
    f"tcgen05.cp{GROUP}{{.128x256b|.128x128b|.64x128b.warpx2::02_13|.64x128b.warpx2::01_23|.32x128b.warpx4}}"
    "{|.b8x16.b4x16_p64|.b8x16.b6x16_p32}",
    since=100,
    only=ARCHS,
    conformance="unverified",
)
def copy(e: Emitter, inst: Inst, group: str, shape: str, formats: str) -> None:
    target, source = inst.operands
    arguments = [repr(shape), repr(formats), group[-1], e.address(target, wide=False), e.get(source, "u8")]
    e.call(_copy, arguments)


def _copy(w: WarpBatch, mask: Array | None, shape: str, formats: str, group: int, target: Array, source: Array) -> None:
    pair = pair_of(w.cta, group)
    for lane in w.lanes(mask):
        address, descriptor = int(w.full(target)[lane]), int(w.full(source)[lane])
        op = memory_of(w.cta).begin(int(w.lane_agents[lane]), KIND, int(w.lane[lane]))

        def run(address: int = address, descriptor: int = descriptor, op: Op | None = op) -> None:
            for cta in pair:
                _copy_one(cta, shape, formats, address, descriptor, op)

        w.cta.post(run, _queue(w, int(lane)))


def _copy_one(cta: Cta, shape: str, formats: str, address: int, descriptor: int, op: Op | None) -> None:
    rows, nbytes, place = _COPIES[shape]
    lane, column = split_address(address)
    if lane or column % 4:  # a GB300 traps on other columns (measured by others)
        raise PtxError(f"tcgen05.cp to lane {lane}, column {column} of tensor memory: accepted are 0, multiples of 4")
    where = smem_matrix.offsets(smem_matrix.blackwell(descriptor, False), 0, rows, nbytes, 1)
    flat = where.ravel()
    cta.smem.check(flat, 16, 16, "tcgen05.cp")
    units = np.ascontiguousarray(cta.smem.op_load(flat, 16, op, "tcgen05.cp")).view(np.uint8).reshape(rows, -1)
    words = np.ascontiguousarray(_UNPACK[formats](units), np.uint8).view(np.uint32)
    columns = column + np.arange(nbytes // 4)
    for lanes in zip(*(place(r) for r in range(rows)), strict=True):
        memory_of(cta).store(np.array(lanes), columns, words, op, "tcgen05.cp")


# --- commit -----------------------------------------------------------------------------------------------------------


@form(
    f"tcgen05.commit{GROUP}.mbarrier::arrive::one{{|.shared::cluster}}{{|.multicast::cluster}}.b64",
    since=100,
    only=ARCHS,
    conformance="unverified",
)
def commit(e: Emitter, inst: Inst, group: str, space: str, multicast: str) -> None:
    address, *rest = inst.operands
    where = e.address(address, wide=False) if space else f"{e.address(address, wide=True)}.astype(u4)"
    ctas = e.get(rest[0], "u4") if multicast else "None"
    e.call(_commit, [group[-1], where, ctas])


def _commit(w: WarpBatch, mask: Array | None, group: int, address: Array, ctas: Array | None) -> None:
    pair_of(w.cta, group)
    for lane in w.lanes(mask):
        agent = int(w.lane_agents[lane])
        at = int(w.full(address)[lane])
        ranks = [at >> RANK_SHIFT]
        if ctas is not None:
            ranks = [rank for rank in range(16) if int(w.full(ctas)[lane]) >> rank & 1]
        stream = memory_of(w.cta).stream(agent, KIND, int(w.lane[lane]))
        op = None if stream is None else stream.commit()
        places = [rank << RANK_SHIFT | at & OFFSET_MASK for rank in ranks]
        barriers = [mbarrier.target(w.cta, place, op, "tcgen05.commit", in_order=True) for place in places]

        def arrive(barriers: list[mbarrier.Mbarrier] = barriers, op: Op | None = op) -> None:
            for barrier in barriers:
                barrier.arrive_by(op, (op.time if op else 0.0) + LATENCY)

        w.cta.post(arrive, _queue(w, int(lane)))
