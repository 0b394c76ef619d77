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
from cute_attn.emulator.errors import PtxError
from cute_attn.emulator.formats import DECODERS
from cute_attn.emulator.isa import mbarrier
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
_FIXED = {  # first bit of a field, number of bits, the value that is accepted: what others stand for
    (0, 2, 0): "a sparsity selector",
    (2, 1, 0): "sparse matrices",
    (3, 1, 0): "saturation",
    (4, 2, 1): "D of another type than f32",
    (6, 1, 0): "a reserved bit",
    (13, 2, 0): "negated operands",
    (23, 1, 0): "a reserved bit",
    (29, 3, 0): "reserved bits",
}


# --- instruction descriptors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """Decoded instruction descriptor of D[m, n] += A[m, k] B[n, k] in fp32, for `group` CTAs."""

    group: int
    m: int
    n: int
    a_type: str
    b_type: str
    a_mn_major: bool
    b_mn_major: bool

    @property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.m // self.group

    def lanes(self, lane: int) -> Array:
        """Lanes of the rows of A and D in one CTA. A CTA with 64 rows uses half the lanes of each warp."""
        if self.rows == 64:
            if lane not in (0, 16):
                raise PtxError(f"a product with M=64 at lane {lane} of tensor memory, accepted are 0 and 16")
            m = np.arange(64)
            return lane + m % 16 + 32 * (m // 16)
        if lane != 0:
            raise PtxError(f"a product with M={self.m} at lane {lane} of tensor memory, accepted is 0")
        return np.arange(128)


@functools.lru_cache(256)
def decode(word: int, kind: str, group: int) -> Instruction:
    """Decode an instruction descriptor. PtxError names an illegal field."""

    def bits(low: int, count: int) -> int:
        return word >> low & ((1 << count) - 1)

    def refuse(reason: str) -> PtxError:
        return PtxError(f"instruction descriptor {word:#010x} of .kind::{kind}, .cta_group::{group}: {reason}")

    for (low, count, accepted), what in _FIXED.items():
        if bits(low, count) != accepted:
            raise refuse(f"bits {low}..{low + count - 1} stand for {what}, which is not supported")
    types = _TYPES[kind]
    for name, code in (("A", bits(7, 3)), ("B", bits(10, 3))):
        if code not in types:
            raise refuse(f"the type of {name} is {code}")
    found = Instruction(
        group=group,
        m=bits(24, 5) << 4,
        n=bits(17, 6) << 3,
        a_type=types[bits(7, 3)],
        b_type=types[bits(10, 3)],
        a_mn_major=bool(bits(15, 1)),
        b_mn_major=bool(bits(16, 1)),
    )
    reason = _wrong(found)
    if reason:
        raise refuse(reason)
    return found


def _wrong(x: Instruction) -> str:
    sizes = {1: (64, 128), 2: (256,)}
    step = (16 if x.b_mn_major and smem_matrix.ITEM_BYTES[x.b_type] == 1 else 8) * x.group
    if x.m not in sizes[x.group]:
        return f"M={x.m}, accepted are {sizes[x.group]}"
    if not x.n or x.n > 256 or x.n % step:
        return f"N={x.n}, a multiple of {step} up to 256 is accepted"
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
        for cta in ctas:
            if self.a_in_tmem:
                left = self._tmem_a(cta, op)
            else:
                left = self._shared(cta, self.a, x.rows, x.a_mn_major, x.a_type, op)
            self._write(cta, left @ right.T, op)

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
        return DECODERS[x.a_type](np.ascontiguousarray(words))

    def _write(self, cta: Cta, product: Array, op: Op) -> None:
        memory = memory_of(cta)
        lane, column = split_address(self.d)
        place = places(self.what.lanes(lane), column + np.arange(self.what.n))
        if self.keep:
            product = product + memory.load(place, op, "tcgen05.mma (D)").view(np.float32)
        memory.store(place, np.ascontiguousarray(product, np.float32).view(np.uint32), op, "tcgen05.mma (D)")


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
        w.cta.post(functools.partial(one.run, pair, op), _queue(w, lane))


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
        ranks = [rank for rank in range(16) if named >> rank & 1] if multicast else [at >> RANK_SHIFT]
        op = memory_of(w.cta).stream(int(w.lane_agents[lane]), KIND, int(w.lane[lane])).commit()
        places = [rank << RANK_SHIFT | at & OFFSET_MASK for rank in ranks]
        barriers = [mbarrier.target(w.cta, place, op, "tcgen05.commit", in_order=True) for place in places]

        def arrive(barriers: list[mbarrier.Mbarrier] = barriers, op: Op = op) -> None:
            for barrier in barriers:
                barrier.arrive_by(op, LATENCY)

        w.cta.post(arrive, _queue(w, lane))
