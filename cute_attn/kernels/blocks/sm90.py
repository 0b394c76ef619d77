"""Hopper PTX: wgmma, TMA, transaction barriers, register reallocation."""

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

_SWIZZLE = {128: 1 << 30, 64: 2 << 30}  # in the upper word of a matrix descriptor, by line bytes


# --- products -------------------------------------------------------------------------------------------------------


def descriptor(address: Int32, leading_bytes: int) -> Int32:
    """Returns the lower word of a matrix descriptor; adding bytes / 16 moves the operand's start."""
    return (address >> 4) | Int32(leading_bytes >> 4 << 16)


def wgmma_from_shared(
    dtype: str, n: int, a: Int32, b: Int32, steps: Sequence[tuple[int, int]], accumulator: Sequence[Float32] = ()
) -> list[Float32]:
    """Starts one wgmma group of products A B of 64 x n, both K-major in shared memory; `steps`: (a, b) byte offsets.

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
    line: int = 128,
) -> list[Float32]:
    """Starts one wgmma group of accumulator + A B: A with 64 x 32 bytes in four registers per step, B in shared memory,
    K-major if it has 8 bits or `k_major` is set, else MN-major; `steps`: byte offsets in B, `line`: bytes of its
    swizzled lines.

    The registers of A must stay untouched until the group has completed: `wgmma_wait` takes them for that.
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
    return asm(_group(declared, lines, line), [Float32] * count, [b, *a], tied=accumulator)


def wgmma_wait(pending: int, results: Sequence[Float32], operands: Sequence[Int32] = ()) -> list[Float32]:
    """Returns the results once at most `pending` newer groups are in flight; `operands`: their A registers."""
    return asm(f"wgmma.wait_group.sync.aligned {pending};", [Float32] * len(results), operands, tied=results)


_SUFFIX = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
# Immediates: signs, then which operands are transposed, for which 8-bit types have no choice.
_K_MAJOR = {"float16": "1, 1, 0, 0", "bfloat16": "1, 1, 0, 0", "float8_e4m3fn": "1, 1", "float8_e5m2": "1, 1"}
_B_AS_STORED = {"float16": "1, 1, 1", "bfloat16": "1, 1, 1", "float8_e4m3fn": "1, 1", "float8_e5m2": "1, 1"}


def _mnemonic(a_dtype: str, b_dtype: str, n: int) -> str:
    k = 16 if a_dtype in ("float16", "bfloat16") else 32
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{_SUFFIX[a_dtype]}.{_SUFFIX[b_dtype]}"


def _group(declared: str, lines: Sequence[str], line: int = 128) -> str:
    high = _SWIZZLE[line] | 8 * line >> 4  # and the stride of eight lines
    constants = f"setp.eq.u32 p, 0, 0; setp.ne.u32 z, 0, 0; mov.b32 h, {high};"
    prologue = f"{{ .reg .pred p, z; .reg .b32 h; {declared} {constants}"
    body = "\n".join(lines)
    return f"{prologue}\nwgmma.fence.sync.aligned;\n{body}\nwgmma.commit_group.sync.aligned; }}"


def stmatrix_x4(address: Int32, offset: int, values: Sequence[Int32]) -> None:
    """Stores four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l // 8, row l % 8."""
    asm(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};", [], [address, *values])


def pack_e4m3(values: Sequence[Float32]) -> Int32:
    """Rounds four numbers to nearest even, the first into the lowest byte; values beyond 448 become 448."""
    text = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
        "mov.b32 $0, {l, h};}"
    )
    return asm(text, [Int32], values, pure=True)


def pack_e4m3_16(pairs: Sequence[Int32]) -> Int32:
    """Rounds two fp16 pairs as `pack_e4m3` does."""
    text = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, $1; cvt.rn.satfinite.e4m3x2.f16x2 h, $2;mov.b32 $0, {l, h};}"
    )
    return asm(text, [Int32], pairs, pure=True)


# --- TMA ------------------------------------------------------------------------------------------------------------


@dsl_user_op
def address_of(tensor_map: Any, *, loc: Any = None, ip: Any = None) -> Int64:
    """Returns the generic address of a tensor map among the kernel's parameters (aligned to 64 bytes there)."""
    pointer = tensor_map.get_ptr(loc=loc, ip=ip).to_llvm_ptr(loc=loc, ip=ip)
    return Int64(llvm.ptrtoint(T.i64(), pointer, loc=loc, ip=ip))


def prefetch_tensor_map(tensor_map: Int64) -> None:
    asm("prefetch.tensormap [$0];", [], [tensor_map])


def tma_load_4d(shared: Int32, tensor_map: Int64, coordinates: Sequence[Int32], barrier: Int32, policy: int) -> None:
    """Copies a box into shared memory; its bytes count towards the barrier's phase. For one thread."""
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1, {$2, $3, $4, $5}], [$6], $7;"
    )
    asm(text, [], [shared, tensor_map, *coordinates, barrier, Int64(policy)])


# --- barriers in shared memory --------------------------------------------------------------------------------------


def barrier_init(barrier: Int32, arrivals: int) -> None:
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [barrier])


def fence_barrier_init() -> None:
    """Makes initialised barriers visible to TMA; other threads still need a CTA barrier."""
    asm("fence.mbarrier_init.release.cluster; fence.proxy.async;")


def fence_async() -> None:
    """Orders this thread's reads and writes of shared memory before later accesses by TMA and wgmma (async proxy)."""
    asm("fence.proxy.async.shared::cta;")


def barrier_expect(barrier: Int32, num_bytes: int) -> None:
    """Arrives and adds `num_bytes` to the transaction count of the phase."""
    asm(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {num_bytes};", [], [barrier])


def barrier_arrive(barrier: Int32) -> None:
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [barrier])


def barrier_wait(barrier: Int32, phase: Int32) -> None:
    """Waits until the phase of parity `phase` is complete."""
    text = (
        "{ .reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n@p bra DONE;\nbra WAIT;\nDONE: }"
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
    return asm(text, [Int32], [ptx.select(value, Int32(1), Int32(0)), barrier]) != 0


def release_registers(count: int) -> None:
    asm(f"setmaxnreg.dec.sync.aligned.u32 {count};")


def claim_registers(count: int) -> None:
    asm(f"setmaxnreg.inc.sync.aligned.u32 {count};")


def atomic_increment(address: Int64) -> Int32:
    return asm("atom.global.add.u32 $0, [$1], 1;", [Int32], [address])


def st_global_u32(address: Int64, value: Int32) -> None:
    asm("st.global.u32 [$0], $1;", [], [address, value])
