"""PTX that only Hopper has: warpgroup products, TMA, transaction barriers, register reallocation."""

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.ptx import asm

# L2 policies as `createpolicy` makes them for a whole access.
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000

_SWIZZLE_128B = 1 << 30  # in the upper word of a matrix descriptor
_ATOM = 1024  # bytes of eight swizzled lines
_DESCRIPTOR_HIGH = _SWIZZLE_128B | _ATOM >> 4


# --- products -------------------------------------------------------------------------------------------------------


def descriptor(address: Int32, leading_bytes: int) -> Int32:
    """Lower word of a matrix descriptor; an operand's start moves by adding bytes / 16."""
    return (address >> 4) | Int32(leading_bytes >> 4 << 16)


def wgmma_from_shared(
    dtype: str, n: int, a: Int32, b: Int32, steps: Sequence[tuple[int, int]], accumulator: Sequence[Float32] = ()
) -> list[Float32]:
    """One group of products A B of 64 x n, both K-major in shared memory; `steps`: (a, b) bytes from the start.

    Without an accumulator the sum starts from zero. The result may be used after `wgmma_wait`.
    """
    count = n // 2
    registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = []
    for i, (a_step, b_step) in enumerate(steps):
        lines.append(f"add.s32 la, ${count}, {a_step >> 4}; add.s32 lb, ${count + 1}, {b_step >> 4};")
        lines.append("mov.b64 da, {la, h}; mov.b64 db, {lb, h};")
        keep = "p" if i or accumulator else "z"
        lines.append(f"{_mnemonic(dtype, dtype, n)} {registers}, da, db, {keep}, {_K_MAJOR[dtype]};")
    declared = ".reg .b32 la, lb; .reg .b64 da, db;"
    return asm(_group(declared, lines), [Float32] * count, [a, b], tied=accumulator)


def wgmma_from_registers(
    a_dtype: str,
    b_dtype: str,
    n: int,
    a: Sequence[Int32],
    b: Int32,
    steps: Sequence[int],
    accumulator: Sequence[Float32] = (),
    k_major: bool = False,
) -> list[Float32]:
    """One group of accumulator + A B: A 64 x 32 bytes in four registers a step, B in shared memory, K-major where it
    has 8 bits or is said to be, else MN-major; `steps`: its bytes from the start.

    The registers of A must stay untouched until the group is waited for: `wgmma_wait` takes them for that.
    """
    count = n // 2
    registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines, stored = [], "1, 1, 0" if k_major else _B_AS_STORED[b_dtype]
    for i, step in enumerate(steps):
        fragment = "{" + ", ".join(f"${count + 1 + 4 * i + j}" for j in range(4)) + "}"
        lines.append(f"add.s32 lb, ${count}, {step >> 4}; mov.b64 db, {{lb, h}};")
        keep = "p" if i or accumulator else "z"
        lines.append(f"{_mnemonic(a_dtype, b_dtype, n)} {registers}, {fragment}, db, {keep}, {stored};")
    declared = ".reg .b32 lb; .reg .b64 db;"
    return asm(_group(declared, lines), [Float32] * count, [b, *a], tied=accumulator)


def wgmma_wait(pending: int, results: Sequence[Float32], operands: Sequence[Int32] = ()) -> list[Float32]:
    """The results once at most `pending` newer groups are in flight; `operands` were theirs."""
    return asm(f"wgmma.wait_group.sync.aligned {pending};", [Float32] * len(results), operands, tied=results)


_SUFFIX = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
# Signs, then which operands are transposed: 8 bits know no such choice.
_K_MAJOR = {"float16": "1, 1, 0, 0", "bfloat16": "1, 1, 0, 0", "float8_e4m3fn": "1, 1", "float8_e5m2": "1, 1"}
_B_AS_STORED = {"float16": "1, 1, 1", "bfloat16": "1, 1, 1", "float8_e4m3fn": "1, 1", "float8_e5m2": "1, 1"}


def _mnemonic(a_dtype: str, b_dtype: str, n: int) -> str:
    k = 16 if a_dtype in ("float16", "bfloat16") else 32
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{_SUFFIX[a_dtype]}.{_SUFFIX[b_dtype]}"


def _group(declared: str, lines: Sequence[str]) -> str:
    constants = f"setp.eq.u32 p, 0, 0; setp.ne.u32 z, 0, 0; mov.b32 h, {_DESCRIPTOR_HIGH};"
    prologue = f"{{ .reg .pred p, z; .reg .b32 h; {declared} {constants}"
    body = "\n".join(lines)
    return f"{prologue}\nwgmma.fence.sync.aligned;\n{body}\nwgmma.commit_group.sync.aligned; }}"


def stmatrix_x4(address: Int32, offset: int, values: Sequence[Int32]) -> None:
    """Four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l // 8, row l % 8."""
    asm(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};", [], [address, *values])


def pack_e4m3(values: Sequence[Float32]) -> Int32:
    """Four numbers rounded to nearest even, the first in the lowest byte; beyond 448 they become 448."""
    text = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
        "mov.b32 $0, {l, h};}"
    )
    return asm(text, [Int32], values, pure=True)


def pack_e4m3_16(pairs: Sequence[Int32]) -> Int32:
    """The same of two pairs of fp16."""
    text = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, $1; cvt.rn.satfinite.e4m3x2.f16x2 h, $2;mov.b32 $0, {l, h};}"
    )
    return asm(text, [Int32], pairs, pure=True)


# --- TMA ------------------------------------------------------------------------------------------------------------


@dsl_user_op
def address_of(tensor_map: Any, *, loc: Any = None, ip: Any = None) -> Int64:
    """Generic address of a tensor map among the kernel's parameters (aligned to 64 bytes there)."""
    pointer = tensor_map.get_ptr(loc=loc, ip=ip).to_llvm_ptr(loc=loc, ip=ip)
    return Int64(llvm.ptrtoint(T.i64(), pointer, loc=loc, ip=ip))


def prefetch_tensor_map(tensor_map: Int64) -> None:
    asm("prefetch.tensormap [$0];", [], [tensor_map])


def tma_load_4d(shared: Int32, tensor_map: Int64, coordinates: Sequence[Int32], barrier: Int32, policy: int) -> None:
    """A box into shared memory; its bytes count towards the barrier's phase. One thread."""
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1, {$2, $3, $4, $5}], [$6], $7;"
    )
    asm(text, [], [shared, tensor_map, *coordinates, barrier, Int64(policy)])


# --- barriers in shared memory --------------------------------------------------------------------------------------


def barrier_init(barrier: Int32, arrivals: int) -> None:
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [barrier])


def fence_barrier_init() -> None:
    """Initialised barriers become visible to TMA; other threads still need a CTA barrier."""
    asm("fence.mbarrier_init.release.cluster; fence.proxy.async;")


def fence_async() -> None:
    """This thread's reads and writes of shared memory come before what TMA and wgmma do there later."""
    asm("fence.proxy.async.shared::cta;")


def barrier_expect(barrier: Int32, num_bytes: int) -> None:
    """Arrives, and adds the bytes that this phase waits for."""
    asm(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {num_bytes};", [], [barrier])


def barrier_arrive(barrier: Int32) -> None:
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [barrier])


def barrier_wait(barrier: Int32, phase: Int32) -> None:
    """Until the phase of that parity is complete."""
    text = (
        "{ .reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n@p bra DONE;\nbra WAIT;\nDONE: }"
    )
    asm(text, [], [barrier, phase])


# --- named barriers and registers -----------------------------------------------------------------------------------


def named_sync(barrier: Int32, threads: int) -> None:
    asm(f"bar.sync $0, {threads};", [], [barrier])


def named_arrive(barrier: Int32, threads: int) -> None:
    asm(f"bar.arrive $0, {threads};", [], [barrier])


def any_of_group(barrier: Int32, value: Boolean) -> Boolean:
    """Whether it holds in any thread of a warpgroup. All of them meet here."""
    vote = "barrier.cta.red.or.aligned.pred q, $2, 128, p;"
    text = f"{{ .reg .pred p, q; setp.ne.s32 p, $1, 0; {vote} selp.s32 $0, 1, 0, q; }}"
    return asm(text, [Int32], [ptx.select(value, Int32(1), Int32(0)), barrier]) != 0


def release_registers(count: int) -> None:
    asm(f"setmaxnreg.dec.sync.aligned.u32 {count};")


def claim_registers(count: int) -> None:
    asm(f"setmaxnreg.inc.sync.aligned.u32 {count};")


def atomic_increment(address: Int64) -> Int32:
    return asm("atom.global.add.u32 $0, [$1], 1;", [Int32], [address])


def st_global_u32(address: Int64, value: Int32) -> None:
    asm("st.global.u32 [$0], $1;", [], [address, value])
