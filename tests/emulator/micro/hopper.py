"""wgmma with every kind of operand, and TMA in every swizzle, rank and direction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.emulator.micro.case import Case, Map, Text, rng
from tests.emulator.micro.collective import small

SPAN = {0: 16, 1: 32, 2: 64, 3: 128}  # bytes of a line by swizzle
DESCRIPTOR_SWIZZLE = {0: 0, 1: 3, 2: 2, 3: 1}  # as matrix descriptors number them
A_BYTES, B_BYTES = 16384, 32768


def cases() -> Iterator[Case]:
    yield from _products()
    yield from _narrow_sums()
    yield from _loads()
    yield from _stores()


# --- wgmma ------------------------------------------------------------------------------------------------------------


def descriptor(leading: int, stride: int, swizzle: int) -> int:
    """Without the start address."""
    return (leading >> 4) << 16 | (stride >> 4) << 32 | DESCRIPTOR_SWIZZLE[swizzle] << 62


def strides(rows: int, swizzle: int, mn_major: bool, k_bytes: int = 32) -> tuple[int, int]:
    """(leading, stride) bytes of a dense operand."""
    line = SPAN[swizzle]
    if not mn_major:
        return (rows * 16, 128) if swizzle == 0 else (16, 8 * line)
    atoms = rows * 2 // line
    if swizzle == 0:  # stride: between 8 rows; leading: between 8 k
        return atoms * 128, 128
    return 8 * line, 8 * line * atoms


def _products() -> Iterator[Case]:
    for kind in ("f16", "bf16"):
        for swizzle in (0, 1, 2, 3):
            for a_major, b_major in ((0, 0), (0, 1), (1, 0), (1, 1)):
                yield product(kind, kind, 64, swizzle, (a_major, b_major))
    for n in (8, 16, 24, 96, 128, 176, 256):
        yield product("bf16", "bf16", n, 3, (0, 0))
    for n in (128, 256):
        yield product("f16", "f16", n, 3, (0, 1))
        yield product("bf16", "bf16", n, 3, (0, 1), registers=True)
    for swizzle in (0, 1, 2, 3):
        yield product("f16", "f16", 32, swizzle, (0, 0), registers=True)
        yield product("e4m3", "e4m3", 64, swizzle, (0, 0))
    for a in ("e4m3", "e5m2"):
        for b in ("e4m3", "e5m2"):
            yield product(a, b, 128, 3, (0, 0))
            yield product(a, b, 32, 3, (0, 0), registers=True)
    yield product("f16", "f16", 64, 3, (0, 0), step=32)  # the second k step of a swizzled line
    yield product("bf16", "bf16", 64, 3, (0, 0), step=96)


def _operand(text: Text, index: int, start: int, leading: int, stride: int, swizzle: int) -> None:
    """Put the descriptor of operand `index` into %rd10 or %rd11."""
    text.add("mov.u32 %r2, sm;", f"add.u32 %r2, %r2, {start};", "shr.u32 %r2, %r2, 4;", "and.b32 %r2, %r2, 0x3fff;")
    text.add("cvt.u64.u32 %rd1, %r2;", f"mov.b64 %rd2, {descriptor(leading, stride, swizzle)};")
    text.add(f"or.b64 %rd1{index}, %rd1, %rd2;")


def _multiply(text: Text, shape: str, count: int, left: str, flags: str) -> None:
    """Issue a product, wait for it and store its `count` registers."""
    outputs = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
    text.add("setp.eq.u32 %p1, 0, 0;", "wgmma.fence.sync.aligned;")
    text.add(
        f"wgmma.mma_async.sync.aligned.{shape} {outputs}, {left}, %rd11, %p1, {flags};",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        f"mad.wide.u32 %rd3, %me, {4 * count}, %dst;",
        *(f"st.global.b32 [%rd3+{4 * i}], %d{i};" for i in range(count)),
    )


def product(
    a: str,
    b: str,
    n: int,
    swizzle: int,
    majors: tuple[int, int],
    *,
    registers: bool = False,
    step: int = 0,
) -> Case:
    """D = A B + D of small integers; the bytes of both operands are as random as the integers: whatever the layout, the
    sums are exact."""
    wide = "16" in a
    name = f"{a}.{b}.n{n}.sw{swizzle}.{majors[0]}{majors[1]}" + (".rs" if registers else "")
    name += f".k{step}" if step else ""
    per = 2 if wide else 1
    blob = small(a, A_BYTES // per, name + "a", 2).tobytes() + small(b, B_BYTES // per, name + "b", 2).tobytes()
    count = n // 2
    text = Text(threads=128, smem=A_BYTES + B_BYTES).fill_shared(A_BYTES + B_BYTES)
    text.add(f".reg .b32 %d<{count}>;")
    for i in range(count):
        text.add(f"mad.lo.u32 %r1, %me, {count}, {i};", "and.b32 %r1, %r1, 7;", "cvt.rn.f32.u32 %r1, %r1;")
        text.add(f"mov.b32 %d{i}, %r1;")
    for index, (rows, start) in enumerate(((64, 0), (n, A_BYTES))):
        _operand(text, index, start + step, *strides(rows, swizzle, bool(majors[index])), swizzle)
    left = "%rd10"
    if registers:
        text.add("mov.u32 %r2, sm;", "mad.lo.u32 %r2, %me, 16, %r2;", "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];")
        left = "{%r4, %r5, %r6, %r7}"
    shape = f"m64n{n}k{16 if wide else 32}.f32.{a}.{b}"
    transposed = (f", {majors[1]}" if registers else f", {majors[0]}, {majors[1]}") if wide else ""
    _multiply(text, shape, count, left, f"1, 1{transposed}")
    return Case("wgmma", name, text.ptx(), blob, 128 * 4 * count, unit="f4", threads=128)


NARROW_N = 16


def _narrow_sums() -> Iterator[Case]:
    """D = A B + D where the sum needs more bits than the tensor cores have for 8-bit operands."""
    for kind, largest in (("e4m3", 0x7E), ("e5m2", 0x7B)):
        yield _narrow_sum(kind, largest, "signs", (0x80, 0.0))
        yield _narrow_sum(kind, largest, "positive", (0, 1.0))
    for spread, name in ((16, "near"), (2**8, "far"), (-(2**8), "cancelling")):
        yield _narrow_sum("e4m3", 0x48, name, (0, float(spread)), least=0x30)


def _narrow_sum(kind: str, largest: int, name: str, sums: tuple[int, float], least: int = 0) -> Case:
    """`sums`: the sign bit of operands, and the largest D, of uniform ones; 0: D of all sizes."""
    source, (sign, high) = rng(f"narrow {kind} {name}"), sums
    codes = source.integers(least, largest + 1, A_BYTES // 2 + B_BYTES // 2).astype(np.uint8)
    codes |= (source.integers(0, 2, len(codes)) * sign).astype(np.uint8)
    count = NARROW_N // 2
    old = source.random((128, count)) * high
    if not high:
        old = source.standard_normal((128, count)) * 2.0 ** source.integers(-12, 16, (128, count))
    text = Text(threads=128, smem=codes.size).fill_shared(codes.size)
    text.add(f".reg .b32 %d<{count}>;", f"mad.wide.u32 %rd3, %me, {4 * count}, %src;")
    text.add(*(f"ld.global.b32 %d{i}, [%rd3+{codes.size + 4 * i}];" for i in range(count)))
    for index, (rows, start) in enumerate(((64, 0), (NARROW_N, A_BYTES // 2))):
        _operand(text, index, start, *strides(rows, 0, False), 0)
    _multiply(text, f"m64n{NARROW_N}k32.f32.{kind}.{kind}", count, "%rd10", "1, 1")
    data = codes.tobytes() + old.astype(np.float32).tobytes()
    return Case("narrow", f"{kind}.{name}", text.ptx(), data, 128 * 4 * count, unit="f4", threads=128)


# --- TMA --------------------------------------------------------------------------------------------------------------

TENSOR_BYTES = 32768
SMEM = 8192
TARGET_BYTES = 10496  # of stores: a little more than 50 rows of 208 bytes


def _numbers(name: str) -> bytes:
    return rng(name).integers(0, 256, TENSOR_BYTES).astype(np.uint8).tobytes()


def _brought(text: Text, nbytes: int, *copy: str) -> Text:
    """Bring bytes by a copy of one thread, wait for them and dump shared memory."""
    text.add(f"mov.u32 %r8, sm;\nadd.u32 %r9, %r8, {SMEM};", "setp.ne.u32 %p1, %me, 0;", "@%p1 bra READY;")
    text.add("mbarrier.init.shared::cta.b64 [%r9], 1;", "fence.mbarrier_init.release.cluster;", "fence.proxy.async;")
    text.add(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {nbytes};", *copy)
    text.add("READY:", "bar.sync 0;", "mov.u32 %r6, 0;")
    text.add("{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%r9], %r6; @!p bra WAIT; }")
    return text.dump_shared(SMEM)


def _place(coordinates: tuple[int, ...]) -> tuple[list[str], str]:
    """What puts a map's address and coordinates into registers, and the operand that they make."""
    registers = [f"%r{20 + i}" for i in range(len(coordinates))]
    moves = [f"mov.b32 {register}, {c};" for register, c in zip(registers, coordinates, strict=True)]
    return ["mov.b64 %rd1, p_map0;", "cvta.param.u64 %rd1, %rd1;", *moves], f"[%rd1, {{{', '.join(registers)}}}]"


def _load(name: str, tensor: Map, coordinates: tuple[int, ...]) -> Case:
    setup, place = _place(coordinates)
    form = f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    text = Text(threads=128, smem=SMEM + 128, maps=1).fill_shared(SMEM, SMEM)
    _brought(text, tensor.box_bytes, *setup, f"{form} [%r8], {place}, [%r9];")
    return Case("tma", name, text.ptx(), _numbers(name), SMEM, "u1", threads=128, maps=(tensor,))


def _loads() -> Iterator[Case]:
    for swizzle in (0, 1, 2, 3):
        width = {0: 64, 1: 16, 2: 32, 3: 64}[swizzle]
        tensor = Map("bfloat16", (100, 50), (208,), (width, 24), swizzle)
        for x, y in ((0, 0), (width, 40), (-8, -3), (96, 48), (40, 60), (200, 0)):
            yield _load(f"load.2d.sw{swizzle}.{x}.{y}", tensor, (x, y))
    yield _load("load.1d", Map("uint8", (1000,), (), (256,)), (900,))
    for dtype in ("uint8", "uint16", "uint32", "int32", "uint64", "float16", "float32"):
        item = np.dtype(dtype).itemsize
        box = (128 // item, 8)
        yield _load(f"load.{dtype}", Map(dtype, (480 // item, 30), (480,), box, 3), (96 // item, 25))
    yield _load("load.3d", Map("float16", (48, 20, 6), (96, 1920), (32, 5, 4), 2), (24, 17, 3))
    yield _load("load.4d", Map("bfloat16", (64, 12, 3, 4), (384, 128, 6144), (64, 6, 2, 2), 3), (0, 8, 2, 1))
    yield _load(
        "load.5d", Map("float32", (16, 5, 4, 3, 4), (64, 320, 1280, 3840), (8, 3, 2, 2, 2), 1), (4, 3, -1, 2, 3)
    )
    yield _load("load.1d.aligned", Map("uint8", (1000,), (), (256,)), (896,))
    yield _load("load.1d.float16", Map("float16", (500,), (), (64,), 3), (448,))
    yield _load("load.2d.sw3.4.0", Map("bfloat16", (100, 50), (208,), (64, 24), 3), (4, 0))
    yield _load("load.edge.uint8", Map("uint8", (101, 50), (112,), (64, 24), 2), (64, 40))


def _stores() -> Iterator[Case]:
    for swizzle in (0, 1, 2, 3):
        width = {0: 64, 1: 16, 2: 32, 3: 64}[swizzle]
        tensor = Map("bfloat16", (100, 50), (208,), (width, 24), swizzle, "out")
        for x, y in ((0, 0), (72, 40), (-8, -3)):
            yield _store(f"store.2d.sw{swizzle}.{x}.{y}", tensor, (x, y))
    for x, y in ((0, -3), (-8, 0), (104, 0), (0, 60), (4, 0)):
        yield _store(f"store.2d.sw3.{x}.{y}", Map("bfloat16", (100, 50), (208,), (64, 24), 3, "out"), (x, y))
    yield _store("store.edge.uint8", Map("uint8", (101, 50), (208,), (64, 24), 2, "out"), (64, 40))
    yield _store("store.edge.float32", Map("float32", (50, 50), (208,), (32, 24), 3, "out"), (32, 40))
    four = Map("float16", (64, 12, 3, 4), (384, 128, 6144), (64, 6, 2, 2), 3, "out")
    yield _store("store.4d", four, (0, 8, 2, 1))


def _store(name: str, tensor: Map, coordinates: tuple[int, ...]) -> Case:
    rank = len(tensor.dims)
    target = TARGET_BYTES if rank == 2 else 4 * 6144
    text = Text(threads=128, smem=SMEM, maps=1).fill_shared(SMEM)
    setup, place = _place(coordinates)
    text.add("setp.ne.u32 %p1, %me, 0;", "@%p1 bra DONE;", "mov.u32 %r8, sm;", *setup)
    form = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    text.add(f"{form} {place}, [%r8];", "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", "DONE:")
    data, initial = _numbers(name)[:SMEM], _numbers(name + "o")[:target]
    if tensor.dtype == "float32":
        sizes = ((SMEM, name), (target, name + "o"))
        data, initial = (rng(seed).integers(-9, 9, n // 4).astype(np.float32).tobytes() for n, seed in sizes)
    return Case("tma", name, text.ptx(), data, target, "u1", threads=128, maps=(tensor,), initial=initial)
