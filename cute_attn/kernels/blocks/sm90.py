"""Hopper PTX: wgmma and the packing of its operands."""

from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Float32, Int32

from cute_attn.kernels.blocks.ptx import SUFFIX, asm
from cute_attn.kernels.formats import DTYPES, LINE

_SWIZZLE = {128: 1 << 30, 64: 2 << 30}  # in the upper word of a matrix descriptor, by line bytes


STEP_BYTES = 32  # of a row of A and of a column of B, per product


def operand_offset(step: int, rows: int) -> int:
    """Returns the byte offset of a step in a K-major operand: columns of lines of `rows` rows, one after the other."""
    column, within = divmod(step, LINE // STEP_BYTES)
    return column * rows * LINE + within * STEP_BYTES


def descriptor(address: Int32, leading_bytes: int) -> Int32:
    """Returns the lower word of a matrix descriptor; adding bytes / 16 moves the operand's start."""
    return (address >> 4) | Int32(leading_bytes >> 4 << 16)


class MatrixA(NamedTuple):
    """A of a group of products, 64 rows: `fragments` are four registers of 64 x 32 bytes for each of the first steps;
    `descriptor` is A in shared memory, K-major, for the other steps, which begin at these byte `offsets`.
    """

    fragments: Sequence[Int32]
    descriptor: Int32 | None = None
    offsets: Sequence[int] = ()


def wgmma(
    a_dtype: str,
    b_dtype: str,
    n: int,
    a: MatrixA,
    b: Int32,
    steps: Sequence[int],
    accumulator: Sequence[Float32] = (),
    k_major: bool = False,
    line: int = 128,
) -> list[Float32]:
    """Starts one wgmma group of accumulator + A B, with B in shared memory, K-major if it has 8 bits or `k_major` is
    set, else MN-major; `steps`: byte offsets in B, `line`: bytes of its swizzled lines.

    Without an accumulator the sum starts from zero. The result may be used after `wgmma_wait`. Fragments must stay
    untouched until the group has completed: `wgmma_wait` takes them for that.
    """
    count, held = n // 2, len(a.fragments) // 4
    shared = [] if a.descriptor is None else [a.descriptor]
    at_a, at_b, first_fragment = count, count + len(shared), count + len(shared) + 1
    registers = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    # Of 16-bit types either order may be stored.
    wide, shape = b_dtype in DTYPES, f"m64n{n}k{16 if a_dtype in DTYPES else 32}"
    mnemonic = f"wgmma.mma_async.sync.aligned.{shape}.f32.{SUFFIX[a_dtype]}.{SUFFIX[b_dtype]}"
    lines = []
    for i, step in enumerate(steps):
        if i < held:
            left = "{" + ", ".join(f"${first_fragment + 4 * i + j}" for j in range(4)) + "}"
        else:
            left = "da"
            lines.append(f"add.s32 la, ${at_a}, {a.offsets[i - held] >> 4}; mov.b64 da, {{la, h}};")
        lines.append(f"add.s32 lb, ${at_b}, {step >> 4}; mov.b64 db, {{lb, h}};")
        keep = "p" if i or accumulator else "z"
        transposed = ("" if i < held else ", 0") + f", {int(not k_major)}" if wide else ""  # A in shared memory, B
        lines.append(f"{mnemonic} {registers}, {left}, db, {keep}, 1, 1{transposed};")
    high = _SWIZZLE[line] | 8 * line >> 4  # and the stride of eight lines
    constants = f"setp.eq.u32 p, 0, 0; setp.ne.u32 z, 0, 0; mov.b32 h, {high};"
    prologue = f"{{ .reg .pred p, z; .reg .b32 h; .reg .b32 la, lb; .reg .b64 da, db; {constants}"
    body = "\n".join(["wgmma.fence.sync.aligned;", *lines, "wgmma.commit_group.sync.aligned; }"])
    return asm(f"{prologue}\n{body}", [Float32] * count, [*shared, b, *a.fragments], tied=accumulator)


def wgmma_wait(pending: int, results: Sequence[Float32], operands: Sequence[Int32] = ()) -> list[Float32]:
    """Returns the results once at most `pending` newer groups are in flight; `operands`: their A registers."""
    return asm(f"wgmma.wait_group.sync.aligned {pending};", [Float32] * len(results), operands, tied=results)


def stmatrix_x4(address: Int32, offset: int, values: Sequence[Int32]) -> None:
    """Stores four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l // 8, row l % 8."""
    asm(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};", [], [address, *values])
