"""PTX wrappers that only the decode kernel uses; `kernels.blocks.ptx` has the shared ones."""

from collections.abc import Sequence

from cutlass import Boolean, Float32, Int32, Int64

from cute_attn.kernels.blocks import ptx
from cute_attn.kernels.blocks.ptx import arithmetic, asm, flag, select

# --- bytes and halves -----------------------------------------------------------------------------------------------

permute_by = arithmetic("prmt.b32", Int32)  # `permute` with a selector known at run time only
mul_f16x2 = arithmetic("mul.rn.f16x2", Int32)
shift_left = arithmetic("shl.b32", Int32)
shift_right = arithmetic("shr.u32", Int32)  # zeros come from above


def e2m1_spread(x: Int32) -> list[Int32]:
    """Convert eight e2m1 numbers: elements i and i + 4 as f16x2, divided by 2^14, for i = 0..3.

    A number N = 8 sign + magnitude must become 2^15 sign + 2^9 magnitude. N * (2^12 + 2^9) puts both fields in place,
    plus bits that a mask removes, provided that the adjacent numbers were masked out first. Only N = 15 would carry
    into the sign: 2^12 is subtracted from each half (and the borrow of the lower half added back): 0 becomes -0.
    Multiplications issue in parallel with the logic instructions.
    """
    even = x & Int32(0x0F0F0F0F)
    odd = asm("sub.u32 $0, $1, $2;", [Int32], [x, even], pure=True)
    return [_spread(even, 0x1200), _spread(odd, 0x120), _spread(even, 0x12), _spread_top(odd)]


E2M1_IN_FP16 = 0x8E008E00


def _spread(x: Int32, factor: int) -> Int32:
    text = f"{{.reg .b32 m; mad.lo.u32 m, $1, {factor}, {-0x0FFF1000}; and.b32 $0, m, {E2M1_IN_FP16};}}"
    return asm(text, [Int32], [x], pure=True)


def _spread_top(x: Int32) -> Int32:
    """`_spread` for the uppermost numbers, whose sign is in place already: only the magnitude is shifted."""
    text = f"{{.reg .b32 m; shr.u32 m, $1, 3; lop3.b32 $0, $1, m, {E2M1_IN_FP16}, 0xA8;}}"  # ($1 | m) & bits
    return asm(text, [Int32], [x], pure=True)


def select_bits(mask: int, a: Int32, b: Int32) -> Int32:
    """Bits of `a` where the mask has ones, else those of `b`."""
    return asm(f"lop3.b32 $0, $1, $2, {mask:#x}, 0xE4;", [Int32], [a, b], pure=True)


def e4m3_pair(x: Int32, half: int) -> Int32:
    """Bytes 2 * half and 2 * half + 1 as f16x2 (sm_89 and later)."""
    source = "lh"[half]
    text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {source};}}"
    return asm(text, [Int32], [x], pure=True)


def scale_f16x2(a: Int32, pair: Int32, half: int) -> Int32:
    """Both halves of `a` times one half of `pair`."""
    source = "lh"[half]
    text = (
        f"{{.reg .b16 l, h; .reg .b32 d; mov.b32 {{l, h}}, $2; mov.b32 d, {{{source}, {source}}}; "
        "mul.rn.f16x2 $0, $1, d;}"
    )
    return asm(text, [Int32], [a, pair], pure=True)


# --- integers -------------------------------------------------------------------------------------------------------

mad_wide = arithmetic("mad.wide.u32", Int64)  # a * b + c, a and b unsigned


def less_unsigned(a: Int32, b: Int32) -> Boolean:
    """a < b as unsigned numbers: negative ones are large."""
    return asm("{.reg .pred p; setp.lt.u32 p, $1, $2; selp.s32 $0, 1, 0, p;}", [Int32], [a, b], pure=True) != Int32(0)


# --- across a warp --------------------------------------------------------------------------------------------------


def movmatrix(x: Int32) -> Int32:
    """Transpose an 8x8 matrix of 16-bit elements: lane l holds elements 2 (l % 4) + {0, 1} of row l // 4."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [Int32], [x])


def ballot(x: Boolean) -> Int32:
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    return asm(text, [Int32], [flag(x)])


# --- memory ---------------------------------------------------------------------------------------------------------


def load_early_if(condition: Boolean, address: Int64, offset: int) -> Int32:
    """Load a word from L2, or 0, that the preceding kernel may still write: for addresses alone, which must be kept
    in bounds. L1 keeps no copy that a later load could find."""
    return ptx.load_if(condition, address, offset, 1, "ld.relaxed.gpu.global")[0]


def prefetch_l2(address: Int64) -> None:
    """Fetch the line of an address into L2; no value is read."""
    asm("prefetch.global.L2 [$0];", [], [address])


def prefetch_l2_if(condition: Boolean, address: Int64, offset: int) -> None:
    text = f"{{.reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0+{offset}];}}"
    asm(text, [], [address, flag(condition)])


def ld_l2_if(condition: Boolean, address: Int64, words: int) -> list[Float32]:
    """`ptx.load_if` that bypasses L1, for words that other CTAs wrote since this one started."""
    return ptx.load_if(condition, address, 0, words, "ld.global.cg", Float32)


def copy_if(
    condition: Boolean, shared: Int32, offset: int, source: Int64, source_offset: int, present: Int32, size: int = 16
) -> None:
    """Copy 4, 8 or 16 bytes with cp.async; bytes from `present` (0 or `size`) on are not read but filled with zeros.
    Where the condition is false, nothing is read or written."""
    form = "cg.shared.global.L2::128B" if size == 16 else "ca.shared.global"
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.{form} [$0+{offset}], [$1+{source_offset}], {size}, $2;}}"
    )
    asm(text, [], [shared, source, present, flag(condition)])


def ldmatrix_bytes(address: Int32, offset: int, count: int) -> list[Int32]:
    """Load one or two matrices of 16 rows of 16 bytes, transposed (sm_100 and later). Lane l gives the address of row
    l % 16 of matrix l // 16 and gets two words of each: bytes l // 4 and l // 4 + 8 of rows 4 (l % 4) + 0..3."""
    registers = ", ".join(f"${i}" for i in range(2 * count))
    text = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{registers}}}, [${2 * count}+{offset}];"
    return asm(text, [Int32] * (2 * count), [address])


def add_arrival(counter: Int64) -> Int32:
    """Add this CTA to a counter in global memory, after a barrier: writes of its threads become visible to every CTA
    that adds itself later. Returns how many CTAs came before."""
    return asm("atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", [Int32], [counter])


def all_of(conditions: Sequence[Boolean]) -> Boolean:
    held = flag(conditions[0])
    for condition in conditions[1:]:
        held = select(condition, held, Int32(0))
    return held != Int32(0)
