"""A kernel that is not ours on the emulator: a small one in CuTe DSL, and the race that it has without its barrier.

The kernel is compiled for Hopper and runs on the CPU. Any PTX text will do: what `launch` needs of a launch is the
symbol, grid, block, bytes of dynamic shared memory and the packed parameters; of global memory, the ranges that exist.
"""

from __future__ import annotations

import re
import struct
import tempfile

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Float32
from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepPTX
from cutlass.cute.runtime import make_ptr

from cute_attn.emulator import EmulatorError, GlobalMemory, Schedule, launch

BLOCKS, THREADS = 4, 128
X, Y = 1 << 40, 2 << 40  # addresses on the emulated GPU: any that do not overlap


@cute.kernel
def reverse_kernel(x: cute.Pointer, y: cute.Pointer) -> None:
    """Reverse each block of THREADS numbers, through shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    layout = cute.make_layout(BLOCKS * THREADS)
    tile = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS), 16)
    tile[thread] = cute.make_tensor(x, layout)[block * THREADS + thread]
    cute.arch.sync_threads()
    cute.make_tensor(y, layout)[block * THREADS + thread] = tile[THREADS - 1 - thread]


@cute.jit
def reverse(x: cute.Pointer, y: cute.Pointer) -> None:
    reverse_kernel(x, y).launch(grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), smem=4 * THREADS)


def compiled() -> str:
    """Return the PTX of the kernel, compiled without a GPU."""
    pointer = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16)
    with tempfile.TemporaryDirectory() as directory:
        options = GPUArch("sm_90a"), KeepPTX(True), DumpDir(directory)
        ptx: str = cute.compile[options](reverse, pointer, pointer).__ptx__
    return ptx


def run(ptx: str, schedule: Schedule) -> bool:
    """Run the kernel; return whether its result is right. Raises EmulatorError where it is at fault."""
    x, y = np.arange(BLOCKS * THREADS, dtype=np.float32), np.empty(BLOCKS * THREADS, np.float32)
    memory = GlobalMemory()
    memory.add("x", X, x.nbytes, writable=False, data=x.view(np.uint8))
    memory.add("y", Y, y.nbytes, valid=False, data=y.view(np.uint8))  # not valid: reading it before a write is an error
    found = re.search(r"\.entry (\w+)\(", ptx)
    assert found is not None
    description = {
        "symbol": found[1],
        "grid": (BLOCKS, 1, 1),
        "block": (THREADS, 1, 1),
        "cluster": (1, 1, 1),
        "smem_bytes": 4 * THREADS,
        "pdl": False,
        "params": struct.pack("<2Q", X, Y),
    }
    stats = launch(ptx, description, memory, schedule=schedule)
    print(f"{schedule.kind}: {stats.warp_instructions} warp instructions")
    return bool((y.reshape(BLOCKS, THREADS) == x.reshape(BLOCKS, THREADS)[:, ::-1]).all())


def main() -> None:
    ptx = compiled()
    right = [run(ptx, Schedule(kind, 1)) for kind in ("eager", "delayed", "adversarial")]
    print("reversed:", all(right))
    broken = re.sub(r"\n\s*(barrier|bar)\.sync[^\n]*", "", ptx, count=1)
    try:
        run(broken, Schedule())
    except EmulatorError as error:
        print(f"without its barrier: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
