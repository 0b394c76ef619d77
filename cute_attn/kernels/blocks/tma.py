"""PTX that Hopper and Blackwell share: TMA, transaction barriers, named barriers, register reallocation, atomics."""

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.ptx import asm

# L2 policies as `createpolicy` makes them for a whole access.
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


# --- TMA ------------------------------------------------------------------------------------------------------------


@dsl_user_op
def address_of(tensor_map: Any, *, loc: Any = None, ip: Any = None) -> Int64:
    """Returns the generic address of a tensor map among the kernel's parameters (aligned to 64 bytes there)."""
    pointer = tensor_map.get_ptr(loc=loc, ip=ip).to_llvm_ptr(loc=loc, ip=ip)
    return Int64(llvm.ptrtoint(T.i64(), pointer, loc=loc, ip=ip))


def prefetch_tensor_map(tensor_map: Int64) -> None:
    asm("prefetch.tensormap [$0];", [], [tensor_map])


def load_4d(
    shared: Int32, tensor_map: Int64, coordinates: Sequence[Int32], barrier: Int32, policy: int, group: str = ""
) -> None:
    """Copies a box into shared memory; its bytes count towards the barrier's phase. For one thread.

    `group` ".cta_group::2": into this CTA's shared memory, at a barrier of either CTA of a pair.
    """
    text = (
        f"cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{group}.L2::cache_hint "
        "[$0], [$1, {$2, $3, $4, $5}], [$6], $7;"
    )
    asm(text, [], [shared, tensor_map, *coordinates, barrier, Int64(policy)])


def store_4d(tensor_map: Int64, coordinates: Sequence[Int32], shared: Int32) -> None:
    """Copies a box from shared memory, as part of this thread's open group of copies."""
    text = "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3, $4}], [$5];"
    asm(text, [], [tensor_map, *coordinates, shared])


def store_commit() -> None:
    asm("cp.async.bulk.commit_group;")


def store_wait_read() -> None:
    """Waits until all stores of this thread have read shared memory."""
    asm("cp.async.bulk.wait_group.read 0;")


# --- barriers in shared memory --------------------------------------------------------------------------------------


def barrier_init(barrier: Int32, arrivals: int) -> None:
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [barrier])


def fence_barrier_init() -> None:
    """Makes initialised barriers visible to TMA; other threads still need a CTA barrier."""
    asm("fence.mbarrier_init.release.cluster; fence.proxy.async;")


def fence_async() -> None:
    """Orders this thread's reads and writes of shared memory before later accesses by TMA and wgmma (async proxy)."""
    asm("fence.proxy.async.shared::cta;")


def barrier_expect(barrier: Int32, num_bytes: Int32 | int) -> None:
    """Arrives and adds `num_bytes` to the transaction count of the phase."""
    if isinstance(num_bytes, int):
        asm(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {num_bytes};", [], [barrier])
    else:
        asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", [], [barrier, num_bytes])


def barrier_arrive(barrier: Int32) -> None:
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [barrier])


def barrier_wait(barrier: Int32, phase: Int32, scope: str = "") -> None:
    """Waits until the phase of parity `phase` is complete. `scope`: of the order, and of the threads that arrive, if
    not the CTA's.
    """
    text = (
        f"{{ .reg .pred p;\nWAIT: mbarrier.try_wait.parity{scope}.shared::cta.b64 p, [$0], $1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE: }"
    )
    asm(text, [], [barrier, phase])


# --- named barriers and registers -----------------------------------------------------------------------------------


def named_sync(barrier: Int32, threads: int) -> None:
    asm(f"bar.sync $0, {threads};", [], [barrier])


def named_arrive(barrier: Int32, threads: int) -> None:
    asm(f"bar.arrive $0, {threads};", [], [barrier])


def any_of_warpgroup(barrier: Int32, value: Boolean) -> Boolean:
    """Returns whether `value` holds in any thread of the warpgroup; synchronises the warpgroup."""
    vote = "barrier.cta.red.or.aligned.pred q, $2, 128, p;"
    text = f"{{ .reg .pred p, q; setp.ne.s32 p, $1, 0; {vote} selp.s32 $0, 1, 0, q; }}"
    return asm(text, [Int32], [ptx.flag(value), barrier]) != 0


def release_registers(count: int) -> None:
    asm(f"setmaxnreg.dec.sync.aligned.u32 {count};")


def claim_registers(count: int) -> None:
    asm(f"setmaxnreg.inc.sync.aligned.u32 {count};")


def atomic_increment(address: Int64) -> Int32:
    return asm("atom.global.add.u32 $0, [$1], 1;", [Int32], [address])
