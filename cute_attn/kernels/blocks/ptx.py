"""Inline PTX that several kernels share.

Memory instructions are volatile, so that the compiler keeps them in order around barriers; arithmetic is not, so that
it may be merged and moved. Addresses of shared memory are 32-bit (`Int32`), of global memory 64-bit (`Int64`); a
Python integer `offset` becomes an immediate of the address.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cutlass import Boolean, Float32, Float64, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op, select_

from cute_attn.kernels.formats import DTYPES

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")

_LETTER = {Int32: "r", Int64: "l", Float32: "f", Float64: "d"}
_MLIR = {Int32: T.i32, Int64: T.i64, Float32: T.f32, Float64: T.f64}


@dsl_user_op
def asm(
    text: str,
    outputs: Sequence[type] = (),
    inputs: Sequence[Any] = (),
    *,
    tied: Sequence[Any] = (),
    pure: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Inline PTX; operands $0.. are outputs, then inputs (typed cutlass scalars). Returns a scalar, a list or None.

    `tied`: initial values of the first outputs, in the same registers.
    """
    values = [x.ir_value(loc=loc, ip=ip) for x in (*inputs, *tied)]
    letters = ["=" + _LETTER[t] for t in outputs] + [_LETTER[type(x)] for x in inputs]
    letters += [str(i) for i in range(len(tied))]
    types = [_MLIR[t]() for t in outputs]
    if len(types) > 1:
        result_type: ir.Type | None = llvm.StructType.get_literal(types)
    else:
        result_type = types[0] if types else None
    result = llvm.inline_asm(result_type, values, text, ",".join(letters), has_side_effects=not pure, loc=loc, ip=ip)
    if not types:
        return None
    if len(types) == 1:
        return outputs[0](result)
    parts = [llvm.extractvalue(t, result, [i], loc=loc, ip=ip) for i, t in enumerate(types)]
    return [cls(part) for cls, part in zip(outputs, parts, strict=True)]


# --- matrix ---------------------------------------------------------------------------------------------------------


def ldmatrix_x4(address: Int32, offset: int, *, transpose: bool = False) -> list[Int32]:
    """Loads four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l // 8, row l % 8."""
    trans = ".trans" if transpose else ""
    return asm(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];",
        [Int32] * 4,
        [address],
    )


SUFFIX = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}  # of instructions


def mma(a_dtype: str, b_dtype: str, a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> list[Float32]:
    """Computes C + A(16 x k, row) B(k x 8, col) with fp32 accumulation. k is 16 of 16-bit dtypes, 32 of fp8 (sm_89 and
    later).
    """
    text = (
        f"mma.sync.aligned.m16n8k{16 if a_dtype in DTYPES else 32}.row.col.f32.{SUFFIX[a_dtype]}.{SUFFIX[b_dtype]}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(text, [Float32] * 4, [*a, *b, *c], pure=True)


# --- copies ---------------------------------------------------------------------------------------------------------


_CP_ASYNC = {16: "cg.shared.global.L2::128B", 8: "ca.shared.global.L2::128B", 4: "ca.shared.global"}  # cg bypasses L1


def cp_async(shared: Int32, offset: int, source: Int64, source_offset: int, src_bytes: Int32, size: int = 16) -> None:
    """Copies 4, 8 or 16 bytes global -> shared; bytes past `src_bytes` (0 or `size`) are zero-filled, not read."""
    text = f"cp.async.{_CP_ASYNC[size]} [$0+{offset}], [$1+{source_offset}], {size}, $2;"
    asm(text, [], [shared, source, src_bytes])


def cp_async_commit() -> None:
    asm("cp.async.commit_group;")


def cp_async_wait(pending: int) -> None:
    """Waits until at most `pending` of this thread's newest groups are in flight."""
    asm(f"cp.async.wait_group {pending};")


def cp_async_arrive(barrier: Int32) -> None:
    """Arrives for this thread once all its copies so far have completed."""
    asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], [barrier])


class Load:
    """Loads of one scalar, or of a list of 2 or 4 adjacent ones, from an address and an immediate offset. `form`: their
    type in memory, if not that of the scalar.
    """

    def __init__(self, space: str, kind: type, count: int = 1, form: str = "") -> None:
        registers = ", ".join(f"${i}" for i in range(count))
        self.outputs, self.form = [kind] * count, _vector(space, kind, count, form)
        self.registers, self.address = f"{{{registers}}}" if count > 1 else registers, f"${count}"

    def __call__(self, address: Int32 | Int64, offset: int = 0) -> Any:
        return asm(f"ld.{self.form} {self.registers}, [{self.address}+{offset}];", self.outputs, [address])


class Store:
    """Stores of one scalar, or of a list of 2 or 4, as those of `Load`."""

    def __init__(self, space: str, kind: type, count: int = 1, form: str = "") -> None:
        registers = ", ".join(f"${i + 1}" for i in range(count))
        self.form, self.registers = _vector(space, kind, count, form), f"{{{registers}}}" if count > 1 else registers

    def __call__(self, address: Int32 | Int64, offset: int, values: Any) -> None:
        values = values if isinstance(values, Sequence) else [values]
        asm(f"st.{self.form} [$0+{offset}], {self.registers};", [], [address, *values])


_FORM = {Int32: "b32", Int64: "b64", Float32: "f32"}


def _vector(space: str, kind: type, count: int, form: str) -> str:
    return f"{space}{f'.v{count}' if count > 1 else ''}.{form or _FORM[kind]}"


ld_shared_b32, ld_shared_f32 = Load("shared", Int32), Load("shared", Float32)
ld_shared_u16 = Load("shared", Int32, form="u16")
ld_shared_v2, ld_shared_v2_f32 = Load("shared", Int32, 2), Load("shared", Float32, 2)
ld_shared_v4, ld_shared_v4_f32 = Load("shared", Int32, 4), Load("shared", Float32, 4)
ld_global_u32, ld_global_f32 = Load("global", Int32), Load("global", Float32)
ld_global_v2, ld_global_v4 = Load("global", Int32, 2), Load("global", Int32, 4)
ld_global_u8 = Load("global", Int32, form="u8")

st_shared_b32, st_shared_f32 = Store("shared", Int32), Store("shared", Float32)
st_shared_v2, st_shared_v2_f32 = Store("shared", Int32, 2), Store("shared", Float32, 2)
st_shared_v4, st_shared_v4_f32 = Store("shared", Int32, 4), Store("shared", Float32, 4)
st_global_b32, st_global_f32 = Store("global", Int32), Store("global", Float32)
st_global_v2, st_global_v2_f32 = Store("global", Int32, 2), Store("global", Float32, 2)
st_global_v4, st_global_v4_f32 = Store("global", Int32, 4), Store("global", Float32, 4)


def load_if(
    condition: Boolean, address: Int64, offset: int = 0, words: int = 1, form: str = "ld.global", kind: type = Int32
) -> list[Any]:
    """Loads 1, 2 or 4 words from global memory; where the condition is false, reads nothing and returns zeros."""
    temporaries = [f"t{i}" for i in range(words)]
    names = ", ".join(temporaries)
    vector, group = (f".v{words}", f"{{{names}}}") if words > 1 else ("", names)
    text = (
        f"{{.reg .pred p; .reg .b32 {names}; setp.ne.b32 p, ${words + 1}, 0; "
        + " ".join(f"mov.b32 {t}, 0;" for t in temporaries)
        + f" @p {form}{vector}.b32 {group}, [${words}+{offset}]; "
        + " ".join(f"mov.b32 ${i}, {t};" for i, t in enumerate(temporaries))
        + "}"
    )
    loaded = asm(text, [kind] * words, [address, flag(condition)])
    return loaded if words > 1 else [loaded]


def load_word_if(condition: Boolean, address: Int64, offset: int = 0) -> Int32:
    return load_if(condition, address, offset)[0]


def ld_page_id_if(wanted: Boolean, address: Int64) -> Int32:
    """Loads an entry of a page table if `wanted`, otherwise 0. Entries of -1, of pages that are gone because a window
    hides them, become 0: a page that can be read, and whose rows count nothing.
    """
    return maximum(load_word_if(wanted, address), Int32(0))


def ld_global_v4_f32_if(address: Int64, wanted: Boolean) -> list[Float32]:
    """Loads if `wanted`; otherwise returns zeros and reads nothing."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    text = f"{{.reg .pred p; setp.ne.b32 p, $5, 0; {zeros} @p ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4];}}"
    return asm(text, [Float32] * 4, [address, flag(wanted)])


def st_global_v8(address: Int64, offset: int, values: Sequence[Any], aligned: Boolean) -> None:
    """Stores 32 bytes, at once where `aligned` to as many says so, else in two parts (sm_100 and later)."""
    registers = [f"${i + 2}" for i in range(8)]
    whole, low, high = (", ".join(part) for part in (registers, registers[:4], registers[4:]))
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.v8.b32 [$0+{offset}], {{{whole}}};"
        f"@!p st.global.v4.b32 [$0+{offset}], {{{low}}}; @!p st.global.v4.b32 [$0+{offset + 16}], {{{high}}};}}"
    )
    asm(text, [], [address, flag(aligned), *values])


# --- synchronisation ------------------------------------------------------------------------------------------------


def sync_threads() -> None:
    asm("bar.sync 0;")


def sync_warp() -> None:
    asm("bar.warp.sync 0xffffffff;")


def grid_dependency_wait() -> None:
    """Waits until the preceding kernels of the stream have finished and their writes are visible (sm_90 and later)."""
    asm("griddepcontrol.wait;")


def grid_dependency_launch() -> None:
    """Lets the next kernel of the stream start its prologue (sm_90 and later)."""
    asm("griddepcontrol.launch_dependents;")


def thread_index() -> Int32:
    """Reads the thread index at each call, so that values derived from it need not stay in registers in between."""
    return asm("mov.u32 $0, %tid.x;", [Int32])


# --- arithmetic -----------------------------------------------------------------------------------------------------


def arithmetic(form: str, kind: type = Float32) -> Callable[..., Any]:
    """Returns the function of an instruction, of its operands, which have the type of its result."""

    def compute(*operands: Any) -> Any:
        registers = ", ".join(f"${i}" for i in range(len(operands) + 1))
        return asm(f"{form} {registers};", [kind], operands, pure=True)

    return compute


exp2 = arithmetic("ex2.approx.ftz.f32")
log2 = arithmetic("lg2.approx.ftz.f32")
tanh = arithmetic("tanh.approx.f32")  # with an absolute error up to 2^-11 (the PTX ISA's bound)
sin = arithmetic("sin.approx.ftz.f32")
cos = arithmetic("cos.approx.ftz.f32")
reciprocal = arithmetic("rcp.approx.ftz.f32")
floor = arithmetic("cvt.rmi.f32.f32")
magnitude = arithmetic("abs.f32")
fma = arithmetic("fma.rn.f32")
fmax = arithmetic("max.f32")
fmin = arithmetic("min.f32")
fmax_nan = arithmetic("max.NaN.f32")  # NaN if any operand is; of three operands on sm_100 and later
divide = arithmetic("div.u32", Int32)  # 0 <= a < 2^32 by b > 0, rounding down
count_ones = arithmetic("popc.b32", Int32)
minimum_u32 = arithmetic("min.u32", Int32)
subtract_f16 = arithmetic("sub.rn.f16x2", Int32)  # of pairs


def mad_u32(a: Int32, b: Int64, c: Int64) -> Int64:
    """Computes a * b + c in 64 bits, for a >= 0."""
    text = "{.reg .b64 t; cvt.u64.u32 t, $1; mad.lo.s64 $0, t, $2, $3;}"
    return asm(text, [Int64], [a, b, c], pure=True)


def fraction_words(x: Float64) -> tuple[Int32, Int32]:
    """Returns (upper, lower) with upper + lower * 2^-32 = (x - floor(x)) * 2^32; upper is unsigned, lower signed."""
    scale = "0d41F0000000000000"  # 2^32
    text = (
        "{.reg .f64 a, b; cvt.rmi.f64.f64 a, $2; sub.rn.f64 a, $2, a;"
        f"mul.rn.f64 a, a, {scale}; cvt.rni.u32.f64 $0, a; cvt.rn.f64.u32 b, $0; sub.rn.f64 a, a, b;"
        f"mul.rn.f64 a, a, {scale}; cvt.rni.s32.f64 $1, a;}}"
    )
    upper, lower = asm(text, [Int32, Int32], [x], pure=True)
    return upper, lower


def scaled_fraction(n: Int32, upper: Int32, lower: Int32) -> Float32:
    """Returns n times the fraction of `fraction_words` without whole turns: units of 2^-32, from -2^31 to 2^31."""
    text = "{.reg .b32 t; mul.lo.u32 t, $1, $2; mad.hi.s32 t, $1, $3, t; cvt.rn.f32.s32 $0, t;}"
    return asm(text, [Float32], [n, upper, lower], pure=True)


def _shuffle(mode: str, x: Any, lane: Any, clamp: int = 31) -> Any:
    """Reads a scalar of 32 or 64 bits of another lane."""
    known = isinstance(lane, int)
    form, place = f"shfl.sync.{mode}.b32", f"{lane if known else '$2'}, {clamp}, 0xffffffff;"
    text = f"{form} $0, $1, {place}"
    if isinstance(x, Int64):
        halves = f"{form} l, l, {place} {form} h, h, {place}"
        text = f"{{.reg .b32 l, h; mov.b64 {{l, h}}, $1; {halves} mov.b64 $0, {{l, h}};}}"
    return asm(text, [type(x)], [x] if known else [x, lane])


def shuffle_xor(x: Any, lane_mask: int) -> Any:
    """Reads a scalar of the lane whose index differs in these bits."""
    return _shuffle("bfly", x, lane_mask)


def shuffle_from(x: Any, lane: Int32) -> Any:
    """Reads a scalar of another lane."""
    return _shuffle("idx", x, lane)


def shuffle_up(x: Any, delta: int) -> Any:
    """Reads a scalar of the lane `delta` below; lanes without such a lane keep their own."""
    return _shuffle("up", x, delta, clamp=0)


def reduce_lanes(op: Callable[[Any, Any], Any], x: Any, lane_masks: Sequence[int] = (1, 2, 4, 8, 16)) -> Any:
    """Reduces over the lanes whose indices differ in these bits; by default over the warp."""
    for lane_mask in lane_masks:
        x = op(x, shuffle_xor(x, lane_mask))
    return x


def _over_warp(op: str) -> Callable[[Int32], Int32]:
    """Returns a reduction of all lanes' numbers."""
    return lambda x: asm(f"redux.sync.{op}.s32 $0, $1, 0xffffffff;", [Int32], [x])


warp_minimum, warp_maximum, warp_sum = (_over_warp(op) for op in ("min", "max", "add"))


def pack_16(dtype: str, lo: Float32, hi: Float32) -> Int32:
    """Rounds two floats to nearest even, `lo` into the low half."""
    return asm(f"cvt.rn.{SUFFIX[dtype]}x2.f32 $0, $1, $2;", [Int32], [hi, lo], pure=True)


def unpack_16(dtype: str, pair: Int32) -> list[Float32]:
    """Returns (low half, high half) as floats."""
    if dtype == "float16":
        text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}"
    else:  # bfloat16 is the upper half of a float; cvt.f32.bf16 would need sm_90
        text = "{shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;}"
    return asm(text, [Float32, Float32], [pair], pure=True)


def pack_pairs(dtype: str, values: Sequence[Float32]) -> list[Int32]:
    """Packs adjacent numbers."""
    return [pack_16(dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]


def unpack_pairs(dtype: str, pairs: Sequence[Int32]) -> list[Float32]:
    return [x for pair in pairs for x in unpack_16(dtype, pair)]


# --- narrow numbers -------------------------------------------------------------------------------------------------


def permute(a: Int32, b: Int32, selector: int) -> Int32:
    """Selects four of the eight bytes of (a, b), of which b has 4 to 7: one selector digit per byte, lowest first."""
    return asm(f"prmt.b32 $0, $1, $2, {selector:#x};", [Int32], [a, b], pure=True)


def multiply_16(dtype: str, a: Int32, b: Int32) -> Int32:
    """Multiplies pairs, by an fma, because sm_80 has no bf16 multiplication; subnormal numbers are kept."""
    text = f"{{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.{SUFFIX[dtype]}x2 $0, $1, $2, z;}}"
    return asm(text, [Int32], [a, b], pure=True)


def e5m2x4_to_f16(word: Int32) -> list[Int32]:
    """Converts four e5m2 numbers: e5m2 is the upper half of fp16."""
    return [permute(word, Int32(0), selector) for selector in (0x1404, 0x3424)]


def e4m3x4_to_f16(word: Int32, native: bool) -> list[Int32]:
    if native:
        text = "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;}"
        return asm(text, [Int32, Int32], [word], pure=True)
    # Exponent and mantissa shifted to fp16's positions give x / 256, also for subnormal numbers. The only NaN, all
    # seven bits set, carries into the sign bit when 1 is added, from where it sets fp16's exponent.
    text = (
        "{.reg .b32 s, x, n, m; and.b32 s, $1, 0x80008000; shr.u32 x, $1, 1; and.b32 x, x, 0x3f803f80;"
        "and.b32 n, $1, 0x7f007f00; add.u32 n, n, 0x01000100; and.b32 n, n, 0x80008000; shr.u32 m, n, 5;"
        "sub.u32 n, n, m; or.b32 x, x, s; or.b32 $0, x, n;}"
    )
    moved = [asm(text, [Int32], [pair], pure=True) for pair in e5m2x4_to_f16(word)]
    return [multiply_16("float16", pair, Int32(0x5C005C00)) for pair in moved]


def fp8x4_to_bf16(stored: str, word: Int32) -> list[Int32]:
    """Converts four fp8 numbers (sm_100 and later, PTX ISA 9.2)."""
    kind = SUFFIX[stored]
    text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $2; cvt.rn.bf16x2.{kind}x2 $0, l; cvt.rn.bf16x2.{kind}x2 $1, h;}}"
    return asm(text, [Int32, Int32], [word], pure=True)


def pack_8(dtype: str, values: Sequence[Float32]) -> Int32:
    """Rounds four numbers to an fp8 dtype, to nearest even, the first into the lowest byte; values beyond the largest
    become it (sm_89 and later).
    """
    cvt = f"cvt.rn.satfinite.{SUFFIX[dtype]}x2.f32"
    text = f"{{.reg .b16 l, h; {cvt} l, $2, $1; {cvt} h, $4, $3; mov.b32 $0, {{l, h}};}}"
    return asm(text, [Int32], values, pure=True)


def pack_8_of_f16(dtype: str, low: Int32, high: Int32) -> Int32:
    """`pack_8` of two fp16 pairs."""
    cvt = f"cvt.rn.satfinite.{SUFFIX[dtype]}x2.f16x2"
    return asm(f"{{.reg .b16 l, h; {cvt} l, $1; {cvt} h, $2; mov.b32 $0, {{l, h}};}}", [Int32], [low, high], pure=True)


def e2m1x8_to_bf16(word: Int32) -> list[Int32]:
    """Converts eight e2m1 numbers, low nibble first, to bf16: shifts exponent and mantissa, then fixes the bias by a
    product. 21 instructions; 15 that look both bytes up need more registers (157 for 128 in fa2's decode at head dim
    128, sm_90a).
    """
    text = "{.reg .b32 s, x; and.b32 s, $1, 0x80008000; shr.u32 x, $1, 6; and.b32 x, x, 0x01C001C0; or.b32 $0, x, s;}"
    upper = word << 4  # the low nibble of every byte in its high half
    result = []
    for byte in range(4):
        pair = permute(word, upper, 0x1111 * byte + 0x0044)  # both nibbles in the top bits of their half
        result.append(multiply_16("bfloat16", asm(text, [Int32], [pair], pure=True), Int32(0x7E807E80)))
    return result


def e2m1x8_to_f16(word: Int32) -> list[Int32]:
    """Converts eight e2m1 numbers, low nibble first, to fp16, whose upper byte is all that they need: `prmt` looks four
    up at a time. 13 instructions.
    """
    magnitudes = word & Int32(0x77777777)  # bit 3 of a selector would replicate a sign
    low, high = Int32(0x3E3C3800), Int32(0x46444240)  # of 0, 0.5, 1, 1.5, and of 2, 3, 4, 6
    evens = word << 4  # signs of even numbers in the top bits of the bytes, as those of odd ones are in `word`
    pairs = []
    for selectors, bytes_ in ((magnitudes, 0x5140), (magnitudes >> 16, 0x7362)):
        text = "{.reg .b32 m, s; prmt.b32 m, $1, $2, $3; prmt.b32 s, $4, $5, $6; lop3.b32 $0, m, s, 0x80808080, 0xF8;}"
        signed = asm(text, [Int32], [low, high, selectors, evens, word, Int32(bytes_)], pure=True)
        pairs += [permute(signed, Int32(0), selector) for selector in (0x1404, 0x3424)]
    return pairs


def cvt_e2m1x8(dtype: str, word: Int32) -> list[Int32]:
    """Converts eight e2m1 numbers, low nibble first (sm_100 and later; bf16: PTX ISA 9.2).

    All bytes are named in one asm: they then select within the word, and take no instructions of their own.
    """
    converted = "".join(f"cvt.rn.{SUFFIX[dtype]}x2.e2m1x2 ${i}, b{i};" for i in range(4))
    text = f"{{.reg .b8 b0, b1, b2, b3; mov.b32 {{b0, b1, b2, b3}}, $4; {converted}}}"
    return asm(text, [Int32] * 4, [word], pure=True)


# --- choices without branches ---------------------------------------------------------------------------------------


def opaque(x: Int32) -> Int32:
    """Hides how x was computed: values derived from it stay inside a loop instead of in registers across it."""
    return asm("mov.b32 $0, $1;", [Int32], [x])


def select(condition: Boolean, a: Any, b: Any) -> Any:
    """Returns a if the condition holds, else b; both scalars of one type."""
    return type(a)(select_(condition, a, b))


def flag(condition: Boolean) -> Int32:
    """Returns 1 if the condition holds, else 0."""
    return select(condition, Int32(1), Int32(0))


bits, from_bits = arithmetic("mov.b32", Int32), arithmetic("mov.b32", Float32)


def minimum(a: Int32, b: Int32) -> Int32:
    return select(a < b, a, b)


def maximum(a: Int32, b: Int32) -> Int32:
    return select(a > b, a, b)
