"""tcgen05.mma and commit: issued by one thread, executed by the tensor cores of one CTA or of a CTA pair."""

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
from cute_attn.emulator.isa.bulk import ranks_of
from cute_attn.emulator.isa.tmem import GROUP, memory_of, pair_of, tensor_call, tensor_form
from cute_attn.emulator.memory import OFFSET_MASK, RANK_SHIFT
from cute_attn.emulator.ptx import Addr, Inst
from cute_attn.emulator.tensor_memory import split_address
from cute_attn.emulator.warp_batch import WarpBatch

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Cta

LATENCY = 300  # of virtual time, for the timeline
KIND = "tcgen05.mma"  # the stream of products of a thread


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

    def run(self, ctas: list[Cta], op: Op | None) -> None:
        x, group = self.what, self.kind.group
        right = np.concatenate([self._shared(cta, self.b, x.n // group, x.b_mn_major, x.b_type, op) for cta in ctas])
        if x.b_negated:
            right = -right
        for cta in ctas:
            rows = umma.rows_of(x, group)
            left = (
                self._tmem_a(cta, op) if self.a_in_tmem else self._shared(cta, self.a, rows, x.a_mn_major, x.a_type, op)
            )
            if x.a_negated:
                left = -left
            self._write(cta, left @ right.T, op)

    def _shared(self, cta: Cta, descriptor: int, rows: int, mn_major: bool, type_: str, op: Op | None) -> Array:
        """Load an operand from shared memory of one CTA: [rows, k]."""
        operand = smem_matrix.blackwell(descriptor, mn_major)
        where = smem_matrix.offsets(operand, 0, rows, umma.K_BYTES, self.kind.item_bytes)
        flat = where.ravel()
        cta.smem.check(flat, 16, "tcgen05.mma operand")
        chunks = cta.smem.op_load(flat, 16, op, "tcgen05.mma").reshape(where.shape)
        raw = np.ascontiguousarray(smem_matrix.matrix(chunks, operand, self.kind.item_bytes))
        return umma.values(raw, type_)

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
        return umma.values(raw, x.a_type)

    def _write(self, cta: Cta, product: Array, op: Op | None) -> None:
        x, group = self.what, self.kind.group
        memory = memory_of(cta)
        lane, column = split_address(self.d)
        lanes = umma.lanes_of(x, group, lane)
        folded = umma.fold(product, x, group)
        columns = column + np.arange(folded.shape[1])
        before = memory.load(lanes, columns, op, "tcgen05.mma (D)") if self.keep else None
        memory.store(lanes, columns, umma.accumulate(folded, before, x), op, "tcgen05.mma (D)")


@tensor_form(f"tcgen05.mma{GROUP}{{.kind::f16|.kind::f8f6f4}}")
def product(e: Emitter, inst: Inst, group: str, kind: str) -> None:
    if len(inst.operands) != 5:
        raise PtxError(f"{inst.op}: disabled lanes and scale-input-d are not supported")
    d, a, b, word, keep = inst.operands
    how = umma.Kind(kind.removeprefix(".kind::"), int(group))
    in_tmem = isinstance(a, Addr)
    left = e.address(a, wide=False) if in_tmem else e.get(a, "u8")
    operands = [e.address(d, wide=False), left, e.get(b, "u8"), e.get(word, "u4"), e.get(keep, "p")]
    e.call(_issue, [e.bind(how, "kind"), str(in_tmem), *operands])


def _issue(
    w: WarpBatch,
    mask: Array | None,
    kind: umma.Kind,
    in_tmem: bool,
    d: Array,
    a: Array,
    b: Array,
    word: Array,
    keep: Array,
) -> None:
    pair = pair_of(w.cta, kind.group)
    for lane, target, left, right, number, adds in w.each(mask, d, a, b, word, keep):
        what = umma.decode(number, kind)
        umma.check_tensor_memory(what, kind, target, left if in_tmem else None)
        one = _Product(kind, what, target, left, in_tmem, right, bool(adds))
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
        stream = memory_of(w.cta).stream(int(w.lane_agents[lane]), KIND, int(w.lane[lane]))
        op = None if stream is None else stream.commit()
        places = [rank << RANK_SHIFT | at & OFFSET_MASK for rank in ranks]
        barriers = [mbarrier.target(w.cta, place, op, "tcgen05.commit", in_order=True) for place in places]

        def arrive(barriers: list[mbarrier.Mbarrier] = barriers, op: Op | None = op) -> None:
            for barrier in barriers:
                barrier.arrive_by(op, LATENCY)

        w.cta.post(arrive, _queue(w, lane))
