"""PTX of data-centre Blackwell: products in tensor memory (tcgen05), tensor memory itself, arithmetic on pairs.

Tensor memory has 128 lanes of 512 32-bit columns. An address is lane << 16 | column; warp w of a warpgroup reaches the
lanes from 32 w. Products of one thread execute in order; all else needs a commit, a wait or a fence.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks.ptx import arithmetic, asm

TMEM_COLUMNS = 512
LANE_SHIFT = 16
WARP_LANES = 32 << LANE_SHIFT  # from the lanes of a warp to those of the next

_SWIZZLE = {128: 2, 64: 4}  # by bytes of a line
_OPERAND_TYPE = {"float16": 0, "bfloat16": 1, "float8_e4m3fn": 0, "float8_e5m2": 1}


# --- products -------------------------------------------------------------------------------------------------------


def instruction_descriptor(
    m: int, n: int, a_dtype: str, b_dtype: str, *, a_mn_major: bool = False, b_mn_major: bool = False
) -> int:
    """Returns the descriptor of D(m, n) in fp32 from A and B, K-major unless said otherwise."""
    types = _OPERAND_TYPE[a_dtype] << 7 | _OPERAND_TYPE[b_dtype] << 10
    return 1 << 4 | types | int(a_mn_major) << 15 | int(b_mn_major) << 16 | n >> 3 << 17 | m >> 4 << 24


def matrix_descriptor(address: Int32, leading_bytes: int = 16, line: int = 128) -> Int64:
    """Returns the descriptor of an operand in shared memory, in swizzled lines of 128 or 64 bytes; adding bytes / 16
    moves its start.

    `leading_bytes`: of an MN-major operand, from one column of lines to the next.
    """
    low = (address >> 4) | Int32(leading_bytes >> 4 << 16)
    high = _SWIZZLE[line] << 29 | 1 << 14 | 8 * line >> 4  # version 1, bytes between blocks of eight lines
    return asm(f"mov.b64 $0, {{$1, {high}}};", [Int64], [low], pure=True)


def kind_of(dtype: str) -> str:
    return "f8f6f4" if dtype.startswith("float8") else "f16"


def elect_one() -> Int32:
    """Returns 1 in one thread of the warp, always the same, and 0 in the others."""
    return asm("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 $0, 1, 0, p;}", [Int32])


def mma(
    kind: str,
    d: Int32,
    a: Int64 | Int32,
    b: Int64,
    descriptor: int,
    steps: Sequence[tuple[int, int]],
    elected: Int32,
    ctas: int = 1,
    accumulate: Boolean | bool = False,
) -> None:
    """Starts D (+)= A B, with B in shared memory. `a`: descriptor of A in shared memory, or (32 bits) its address in
    tensor memory; `steps`: where the parts of the sum begin, bytes of A or columns, and bytes of B.

    Called by a converged warp; the elected thread issues. `ctas` 2: of the leader of a pair, whose CTAs hold half of
    the rows of A and D, and half of the N of B, each at the same addresses.
    """
    smem, known = isinstance(a, Int64), isinstance(accumulate, bool)
    bits, left, unit, keep = (64, "da", 16, "zero") if smem else (32, "[da]", 1, "keep")
    first = int(accumulate) if known else "$4"
    lines = [
        f".reg .pred e, {keep}, one; .reg .b32 w; .reg .b{bits} da; .reg .b64 db; mov.b32 w, {descriptor};",
        f"setp.ne.s32 e, $3, 0; setp.ne.s32 one, 1, 0; setp.ne.s32 {keep}, {first}, 0;",
    ]
    for i, (a_step, b_step) in enumerate(steps):
        lines.append(f"add.s{bits} da, $1, {a_step // unit}; add.s64 db, $2, {b_step >> 4};")
        lines.append(f"@e tcgen05.mma.cta_group::{ctas}.kind::{kind} [$0], {left}, db, w, {'one' if i else keep};")
    asm("{" + "\n".join(lines) + "}", [], [d, a, b, elected, *(() if known else [Int32(accumulate)])])


def commit(barrier: Int32, elected: Int32, ctas: int = 1) -> None:
    """Arrives once all products that the elected thread has issued are complete; orders them before the arrival.

    `ctas` 2: at the barriers at this address in both CTAs of a pair.
    """
    instruction = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    arrive = f"@e {instruction}.b64 [$0];" if ctas == 1 else f"@e {instruction}.multicast::cluster.b64 [$0], m;"
    asm(f"{{.reg .pred e; .reg .b16 m; mov.b16 m, 3; setp.ne.s32 e, $1, 0; {arrive}}}", [], [barrier, elected])


# --- tensor memory --------------------------------------------------------------------------------------------------


def allocate(address: Int32, columns: int, ctas: int = 1) -> None:
    """Allocates columns for the CTA, by a whole warp, and writes their address to shared memory. `ctas` 2: both CTAs of
    a pair do so.
    """
    asm(f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [$0], {columns};", [], [address])
    asm(f"tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;")


def deallocate(tmem: Int32, columns: int, ctas: int = 1) -> None:
    """Frees columns, by the warp that allocated them, after the last access of any warp."""
    asm(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, {columns};", [], [tmem])


def load_columns(address: Int32, offset: int, count: int) -> list[Float32]:
    """Starts loading `count` columns of this thread's lane. The registers may be used after `wait_loads`."""
    registers = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [${count}+{offset}];"
    return asm(text, [Float32] * count, [address])


def wait_loads(values: Sequence[Float32]) -> list[Float32]:
    """Waits for all loads of this thread; returns `values`, so that their uses stay behind the wait."""
    return asm("tcgen05.wait::ld.sync.aligned;", [Float32] * len(values), [], tied=values)


def store_columns(address: Int32, offset: int, values: Sequence[Any]) -> None:
    """Starts storing to columns of this thread's lane."""
    registers = ", ".join(f"${i + 1}" for i in range(len(values)))
    asm(f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [$0+{offset}], {{{registers}}};", [], [address, *values])


def wait_stores() -> None:
    """Waits for all stores of this thread."""
    asm("tcgen05.wait::st.sync.aligned;")


def fence_before_sync() -> None:
    """Orders this thread's tcgen05 operations before a later arrival or barrier."""
    asm("tcgen05.fence::before_thread_sync;")


def fence_after_sync() -> None:
    """Orders this thread's later tcgen05 operations behind an earlier wait or barrier."""
    asm("tcgen05.fence::after_thread_sync;")


# --- arithmetic -----------------------------------------------------------------------------------------------------


def pair(lo: Float32, hi: Float32) -> Int64:
    return asm("mov.b64 $0, {$1, $2};", [Int64], [lo, hi], pure=True)


def halves(x: Int64) -> list[Float32]:
    return asm("mov.b64 {$0, $1}, $2;", [Float32, Float32], [x], pure=True)


fma_pair = arithmetic("fma.rn.ftz.f32x2", Int64)
mul_pair = arithmetic("mul.rn.ftz.f32x2", Int64)
add_pair = arithmetic("add.rn.ftz.f32x2", Int64)
