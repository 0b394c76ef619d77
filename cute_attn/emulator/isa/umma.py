"""tcgen05.mma and commit: issued by one thread, executed by the tensor cores of one CTA or of a CTA pair."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cute_attn.emulator import smem_matrix
from cute_attn.emulator.clocks import Op
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import MemoryFault, PtxError
from cute_attn.emulator.formats import DECODERS
from cute_attn.emulator.isa import mbarrier
from cute_attn.emulator.isa.bulk import ranks_of
from cute_attn.emulator.isa.tmem import GROUP, memory_of, pair_of, tensor_call, tensor_form
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.ptx import Addr, Inst
from cute_attn.emulator.tensor_memory import places, split_address
from cute_attn.emulator.warp_batch import WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 300  # of virtual time, for the timeline
KIND = "tcgen05.mma"  # the stream of products of a thread
A_COLUMNS = 8  # of A in tensor memory
_TYPES = {"f16": {0: "f16", 1: "bf16"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}}
_RESULTS = {0: "f16", 1: "f32"}


# --- instruction descriptors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """Decoded instruction descriptor of D[m, n] += A[m, k] B[n, k], for `group` CTAs."""

    group: int
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_negated: bool
    b_negated: bool
    a_mn_major: bool
    b_mn_major: bool

    @property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.m // self.group

    def lanes(self, lane: int) -> Array:
        """Lanes of D in the order of the rows of `fold`. A single CTA with 64 rows uses half the lanes of each warp."""
        if self.rows == 64 and self.group == 1:
            if lane not in (0, 16):
                raise PtxError(f"a product with M=64 at lane {lane} of tensor memory, accepted are 0 and 16")
            m = np.arange(64)
            return lane + m % 16 + 32 * (m // 16)
        if lane != 0:
            raise PtxError(f"a product with M={self.m} at lane {lane} of tensor memory, accepted is 0")
        return np.arange(128)

    def fold(self, d: Array) -> Array:
        """Arrange D of one CTA [rows, n] as in tensor memory: with 64 rows per CTA of a pair, the right half is below
        the left."""
        if self.rows == 64 and self.group == 2:
            return np.concatenate([d[:, : self.n // 2], d[:, self.n // 2 :]])
        return d

    def accumulate(self, product: Array, before: Array | None) -> Array:
        """Words of D after accumulation onto the words `before`, if any."""
        half = self.d_type == "f16"
        if before is not None:
            product = product + (DECODERS["f16"](before.astype(np.uint16)) if half else before.view(np.float32))
        if half:
            return product.astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.ascontiguousarray(product, np.float32).view(np.uint32)


@functools.lru_cache(256)
def decode(word: int, kind: str, group: int) -> Instruction:
    """Decode an instruction descriptor. PtxError names an illegal field."""

    def bits(low: int, count: int) -> int:
        return word >> low & ((1 << count) - 1)

    def refuse(reason: str) -> PtxError:
        return PtxError(f"instruction descriptor {word:#010x} of .kind::{kind}, .cta_group::{group}: {reason}")

    if bits(2, 1):
        raise refuse("sparse matrices are not supported")
    if bits(3, 1):
        raise refuse("only integers saturate")
    for low, count in {0: 2, 6: 1, 23: 1, 29: 3}.items():
        if bits(low, count):
            raise refuse(f"bits {low}..{low + count - 1} must be 0")
    types = _TYPES[kind]
    for name, code, table in (("A", bits(7, 3), types), ("B", bits(10, 3), types), ("D", bits(4, 2), _RESULTS)):
        if code not in table:
            raise refuse(f"the type of {name} is {code}")
    found = Instruction(
        group=group,
        m=bits(24, 5) << 4,
        n=bits(17, 6) << 3,
        a_type=types[bits(7, 3)],
        b_type=types[bits(10, 3)],
        d_type=_RESULTS[bits(4, 2)],
        a_negated=bool(bits(13, 1)),
        b_negated=bool(bits(14, 1)),
        a_mn_major=bool(bits(15, 1)),
        b_mn_major=bool(bits(16, 1)),
    )
    reason = _wrong(found)
    if reason:
        raise refuse(reason)
    return found


def _wrong(x: Instruction) -> str:
    sizes = {1: (64, 128), 2: (128, 256)}
    step = (16 if x.b_mn_major and smem_matrix.ITEM_BYTES[x.b_type] == 1 else 8) * x.group
    if x.m not in sizes[x.group]:
        return f"M={x.m}, accepted are {sizes[x.group]}"
    if not x.n or x.n > 256 or x.n % step:
        return f"N={x.n}, a multiple of {step} up to 256 is accepted"
    if x.d_type == "f16" and x.a_type in _TYPES["f16"].values() and (x.a_type, x.b_type) != ("f16", "f16"):
        return f"D of f16 with {x.a_type} and {x.b_type}"
    return ""


# --- products ---------------------------------------------------------------------------------------------------------


@dataclass
class _Product:
    """One tcgen05.mma. `a` is an address in tensor memory or a matrix descriptor."""

    what: Instruction
    d: int
    a: int
    a_in_tmem: bool
    b: int
    keep: bool

    def run(self, ctas: list[Cta], op: Op) -> None:
        x = self.what
        n = x.n // x.group
        right = np.concatenate([self._shared(cta, self.b, n, x.b_mn_major, x.b_type, op) for cta in ctas])
        if x.b_negated:
            right = -right
        for cta in ctas:
            if self.a_in_tmem:
                left = self._tmem_a(cta, op)
            else:
                left = self._shared(cta, self.a, x.rows, x.a_mn_major, x.a_type, op)
            self._write(cta, (-left if x.a_negated else left) @ right.T, op)

    def _shared(self, cta: Cta, descriptor: int, rows: int, mn_major: bool, kind: str, op: Op) -> Array:
        """Load an operand from shared memory of one CTA: [rows, k]."""
        operand = smem_matrix.blackwell(descriptor, mn_major)
        return smem_matrix.load(cta.smem, operand, 0, rows, kind, op, "tcgen05.mma")

    def _tmem_a(self, cta: Cta, op: Op) -> Array:
        x = self.what
        if x.a_mn_major:
            raise PtxError("A in tensor memory cannot be transposed")
        lane, column = split_address(self.a)
        lanes = x.lanes(lane)
        words = memory_of(cta).load(places(lanes, column + np.arange(A_COLUMNS)), op, "tcgen05.mma (A)")
        if len(lanes) > x.rows and not (words[: x.rows] == words[x.rows :]).all():
            raise MemoryFault("A in tensor memory: lanes 64..127 must repeat lanes 0..63 where each CTA has 64 rows")
        return DECODERS[x.a_type](np.ascontiguousarray(words[: x.rows]))

    def _write(self, cta: Cta, product: Array, op: Op) -> None:
        memory = memory_of(cta)
        lane, column = split_address(self.d)
        folded = self.what.fold(product)
        place = places(self.what.lanes(lane), column + np.arange(folded.shape[1]))
        before = memory.load(place, op, "tcgen05.mma (D)") if self.keep else None
        memory.store(place, self.what.accumulate(folded, before), op, "tcgen05.mma (D)")


def _check_tensor_memory(x: Instruction, d: int, a: int | None) -> None:
    """Check the addresses of D and, if it lies in tensor memory, of A. Their alignment is what a GB300 traps on
    (measured by others), not a rule of the ISA; that of N is CUTLASS's."""
    if d % 2:
        raise PtxError(f"D at column {d & 0xFFFF} of tensor memory, a multiple of 2 is accepted")
    if a is None:
        return
    if a % 4:
        raise PtxError(f"A at column {a & 0xFFFF} of tensor memory, a multiple of 4 is accepted")
    if x.group == 2 and x.n % 32:
        raise PtxError(f"N={x.n} with A in the tensor memory of two CTAs, a multiple of 32 is accepted")


@tensor_form(f"tcgen05.mma{GROUP}{{.kind::f16|.kind::f8f6f4}}")
def product(e: Emitter, inst: Inst, group: str, kind: str) -> None:
    if len(inst.operands) != 5:
        raise PtxError(f"{inst.op}: disabled lanes and scale-input-d are not supported")
    d, a, b, word, keep = inst.operands
    in_tmem = isinstance(a, Addr)
    left = e.address(a, wide=False) if in_tmem else e.get(a, "u8")
    operands = [e.address(d, wide=False), left, e.get(b, "u8"), e.get(word, "u4"), e.get(keep, "p")]
    e.call(_issue, [repr(kind.removeprefix(".kind::")), group, str(in_tmem), *operands])


def _issue(
    w: WarpBatch,
    mask: Array | None,
    kind: str,
    group: int,
    in_tmem: bool,
    d: Array,
    a: Array,
    b: Array,
    word: Array,
    keep: Array,
) -> None:
    pair = pair_of(w.cta, group)
    for lane, target, left, right, number, adds in w.each(mask, d, a, b, word, keep):
        what = decode(number, kind, group)
        _check_tensor_memory(what, target, left if in_tmem else None)
        one = _Product(what, target, left, in_tmem, right, bool(adds))
        op = memory_of(w.cta).begin(int(w.lane_agents[lane]), KIND, int(w.lane[lane]))
        w.cta.post(lambda one=one, op=op: one.run(pair, op), _queue(w, lane))  # type: ignore[misc]


def _queue(w: WarpBatch, lane: int) -> str:
    """Name of a thread's queue, which keeps its products and commits in order."""
    return f"{KIND} {int(w.lane_agents[lane])} {int(w.lane[lane])}"


# --- commit -----------------------------------------------------------------------------------------------------------


@tensor_call(
    f"tcgen05.commit{GROUP}.mbarrier::arrive::one{{|.shared::cluster}}{{|.multicast::cluster}}.b64",
    operands="$0 $2 [] u4=0",
)
def commit(w: WarpBatch, mask: Array | None, group: str, multicast: str, address: Array, ctas: Array) -> None:
    pair_of(w.cta, int(group))
    for lane, at, named in w.each(mask, address, ctas):
        ranks = ranks_of(named) if multicast else [at >> RANK_SHIFT]
        op = memory_of(w.cta).stream(int(w.lane_agents[lane]), KIND, int(w.lane[lane])).commit()
        places = [rank << RANK_SHIFT | at & OFFSET_MASK for rank in ranks]
        barriers = [mbarrier.target(w.cta, place, op, "tcgen05.commit", in_order=True) for place in places]

        def arrive(barriers: list[mbarrier.Mbarrier] = barriers, op: Op = op) -> None:
            for barrier in barriers:
                barrier.arrive_by(op, LATENCY)

        w.cta.post(arrive, _queue(w, lane))
