"""PTX of clusters: addresses and barriers of other CTAs, and the barrier of all threads of a cluster."""

from cutlass import Int32

from cute_attn.kernels.blocks import tma
from cute_attn.kernels.blocks.ptx import Store, asm


def rank() -> Int32:
    """Returns the rank of this CTA in its cluster."""
    return asm("mov.u32 $0, %cluster_ctarank;", [Int32])


def in_cta(address: Int32, cta: Int32 | int) -> Int32:
    """Returns the address of the same place in the shared memory of a CTA of the cluster."""
    known = isinstance(cta, int)
    text = f"mapa.shared::cluster.u32 $0, $1, {cta if known else '$2'};"
    return asm(text, [Int32], [address] if known else [address, cta], pure=True)


def sync() -> None:
    """Waits for all threads of the cluster."""
    asm("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def arrive_relaxed() -> None:
    """Arrives at the barrier of all threads of the cluster without ordering this thread's accesses of memory."""
    asm("barrier.cluster.arrive.relaxed.aligned;")


def wait() -> None:
    """Waits until all threads of the cluster have arrived."""
    asm("barrier.cluster.wait.acquire.aligned;")


def barrier_arrive(barrier: Int32, *, relaxed: bool = False) -> None:
    """Arrives at a barrier of any CTA of the cluster. `relaxed`: without ordering this thread's accesses of memory,
    which takes a fence for the whole GPU; those of tensor memory have fences of their own.
    """
    order = "relaxed" if relaxed else "release"
    asm(f"mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [$0];", [], [barrier])


def barrier_wait(barrier: Int32, phase: Int32, *, relaxed: bool = False) -> None:
    """Waits at a barrier of this CTA, where threads of other CTAs arrive, for the phase of parity `phase`. `relaxed`:
    the other half of such arrivals; else L1 is invalidated.
    """
    tma.barrier_wait(barrier, phase, ".relaxed.cluster" if relaxed else ".acquire.cluster")


def store_async(address: Int32, values: list[Int32], barrier: Int32) -> None:
    """Stores one, two or four words to a CTA of the cluster; their bytes count towards the phase of a barrier of that
    CTA.
    """
    operands = ", ".join(f"${i + 2}" for i in range(len(values)))
    vector, operands = (f".v{len(values)}", f"{{{operands}}}") if len(values) > 1 else ("", operands)
    text = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [$0], {operands}, [$1];"
    asm(text, [], [address, barrier, *values])


st_shared_v4 = Store("shared::cluster", Int32, 4)


def fence_async() -> None:
    """Orders this thread's accesses of the cluster's shared memory before later ones by TMA and tcgen05."""
    asm("fence.proxy.async.shared::cluster;")
