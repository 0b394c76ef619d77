"""Hopper PTX: wgmma and the packing of its operands."""

from collections.abc import Sequence

from cutlass import Float32, Int32

from cute_attn.kernels.blocks.ptx import asm

_SWIZZLE = {128: 1 << 30, 64: 2 << 30}  # in the upper word of a matrix descriptor, by line bytes


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
