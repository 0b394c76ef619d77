"""Instructions that lanes, warps or CTAs execute together: shuffles, ldmatrix, mma.sync, copies, atomics, barriers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tests.emulator.micro.case import Case, Text, rng

LINE = 128


def cases() -> Iterator[Case]:
    yield from _warp()
    yield from _matrices()
    yield from _mma()
    yield from _copies()
    yield from _atomics()
    yield from _barriers()
    yield from _cluster()


def store_lane(text: Text, *registers: str) -> Text:
    """Registers of every thread, one after another."""
    count = len(registers)
    text.add(f"mad.wide.u32 %rd60, %me, {4 * count}, %dst;")
    return text.add(*(f"st.global.b32 [%rd60+{4 * i}], {r};" for i, r in enumerate(registers)))


def load_lane(text: Text, count: int) -> Text:
    """Words of every thread into %r0, %r1, ..."""
    text.add(f"mad.wide.u32 %rd61, %me, {4 * count}, %src;")
    return text.add(*(f"ld.global.b32 %r{i}, [%rd61+{4 * i}];" for i in range(count)))


def lane_case(family: str, name: str, text: Text, registers: Sequence[str], data: bytes, unit: str = "u4") -> Case:
    """The registers are the result of every thread."""
    ptx = store_lane(text, *registers).ptx()
    return Case(family, name, ptx, data, 4 * len(registers) * text.threads, unit, threads=text.threads)


def _words(name: str, count: int, low: int = 0, high: int = 1 << 32) -> np.ndarray:  # type: ignore[type-arg]
    return rng(name).integers(low, high, count, dtype=np.uint64).astype(np.uint32)


def _warp() -> Iterator[Case]:
    for mode in ("up", "down", "bfly", "idx"):
        for clamp in (31, 0, 0x1F00 | 31, 0x1800 | 7, 0x1000 | 15, 0x1C03):
            name = f"shfl.{mode}.{clamp:#x}"
            text = load_lane(Text(threads=64), 2)
            text.add("and.b32 %r1, %r1, 31;", f"shfl.sync.{mode}.b32 %r2|%p1, %r0, %r1, {clamp}, -1;")
            # Lanes out of range keep their own value; the source of a lane in range is defined.
            text.add("selp.b32 %r3, 1, 0, %p1;")
            yield lane_case("warp", name, text, ("%r2", "%r3"), _words(name, 128).tobytes())
    name = "votes"
    text = load_lane(Text(threads=64), 1).add("setp.lt.u32 %p1, %r0, 3;")
    text.add("vote.sync.ballot.b32 %r1, %p1, -1;")
    text.add(*(f"vote.sync.{m}.pred %p{i}, %p1, -1;" for i, m in ((2, "any"), (3, "all"), (4, "uni"))))
    text.add(*(f"selp.b32 %r{i}, 1, 0, %p{i};" for i in (2, 3, 4)))
    text.add("match.any.sync.b32 %r5, %r0, -1;", "match.all.sync.b32 %r6|%p5, %r0, -1;", "selp.b32 %r7, 1, 0, %p5;")
    text.add("activemask.b32 %r8;")
    values = _words(name, 64, 0, 6)
    values[32:] = 2
    yield lane_case("warp", name, text, [f"%r{i}" for i in range(1, 9)], values.tobytes())
    for op in ("add.u32", "min.s32", "max.s32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32"):
        name = f"redux.{op}"
        text = load_lane(Text(threads=64), 1).add(f"redux.sync.{op} %r1, %r0, -1;")
        yield lane_case("warp", name, text, ["%r1"], _words(name, 64).tobytes())
    # Half a warp at a time, by divergence
    text = load_lane(Text(threads=32), 1).add("setp.lt.u32 %p1, %me, 12;", "mov.u32 %r1, 0;", "@!%p1 bra OTHER;")
    text.add("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xfff;", "activemask.b32 %r2;", "bra JOIN;", "OTHER:")
    text.add("vote.sync.ballot.b32 %r1, %p1, 0xfffff000;", "activemask.b32 %r2;", "JOIN:", "bar.warp.sync -1;")
    yield lane_case("warp", "divergent", text, ["%r1"], _words("divergent", 32).tobytes())
    text = load_lane(Text(threads=64), 1).add("elect.sync %r1|%p1, -1;", "selp.b32 %r2, 1, 0, %p1;")
    yield lane_case("warp", "elect", text, ["%r2"], _words("elect", 64).tobytes())


def _matrices() -> Iterator[Case]:
    """Rows at addresses in a shuffled order."""
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            rows = rng(f"ldmatrix.x{count}{trans}").permutation(64)[:32].astype(np.uint32) * 16
            data = rng(f"ldmatrix.x{count}{trans}").integers(0, 256, 1024).astype(np.uint8).tobytes() + rows.tobytes()
            registers = [f"%r{i}" for i in range(count)]
            text, form, words = _rows(), f"sync.aligned.m8n8.x{count}{trans}.shared.b16", f"{{{', '.join(registers)}}}"
            text.add(f"ldmatrix.{form} {words}, [%r9];")
            yield lane_case("matrix", f"ldmatrix.x{count}{trans}", text, registers, data)
            if not trans:
                text = _rows().add(*(f"mad.lo.u32 %r{i}, %me, 65537, {i * 4096 + 256};" for i in range(count)))
                text.add(f"stmatrix.{form} [%r9], {words};")
                yield Case("matrix", f"stmatrix.x{count}", text.dump_shared(1024).ptx(), data, 1024)


def _rows() -> Text:
    """Shared memory, and the address of each lane's row in %r9."""
    text = Text(threads=32, smem=2048).fill_shared(1024)
    text.add("mad.wide.u32 %rd1, %me, 4, %src;", "ld.global.b32 %r9, [%rd1+1024];", "mov.u32 %r8, sm;")
    return text.add("add.u32 %r9, %r9, %r8;")


def small(kind: str, count: int, name: str, spread: int = 3) -> np.ndarray:  # type: ignore[type-arg]
    """Small integers in a float format: products and sums of them are exact."""
    numbers = rng(name).integers(-spread, spread + 1, count)
    if kind == "f16":
        return numbers.astype(np.float16).view(np.uint8)
    if kind == "bf16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    codes = {"e4m3": {0: 0, 1: 0x38, 2: 0x40, 3: 0x44}, "e5m2": {0: 0, 1: 0x3C, 2: 0x40, 3: 0x42}}[kind]
    return np.array([codes[abs(int(n))] | (0x80 if n < 0 else 0) for n in numbers], np.uint8)


def _mma() -> Iterator[Case]:
    shapes = [("m16n8k16", 4, 2, "f16", "f16"), ("m16n8k16", 4, 2, "bf16", "bf16"), ("m16n8k8", 2, 1, "f16", "f16")]
    shapes += [("m16n8k8", 2, 1, "bf16", "bf16")]
    shapes += [("m16n8k32", 4, 2, a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    for shape, a_count, b_count, a, b in shapes:
        name = f"{shape}.{a}.{b}"
        total = a_count + b_count + 4
        text = load_lane(Text(threads=32), total)
        groups = [list(range(a_count)), list(range(a_count, a_count + b_count)), list(range(a_count + b_count, total))]
        lists = ["{" + ", ".join(f"%r{i}" for i in group) + "}" for group in groups]
        text.add(f"mma.sync.aligned.{shape}.row.col.f32.{a}.{b}.f32 {{%r20, %r21, %r22, %r23}}, {', '.join(lists)};")
        per_word = 2 if "16" in a else 4
        words = [
            small(a, 32 * a_count * per_word, name + "a").view(np.uint32).reshape(32, -1),
            small(b, 32 * b_count * per_word, name + "b").view(np.uint32).reshape(32, -1),
            rng(name).integers(-9, 9, (32, 4)).astype(np.float32).view(np.uint32),
        ]
        data = np.concatenate(words, axis=1).astype(np.uint32).tobytes()
        yield lane_case("mma", name, text, ("%r20", "%r21", "%r22", "%r23"), data, unit="f4")


def _copies() -> Iterator[Case]:
    for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        name = f"cp.async.{cache}.{size}"
        counts = (np.arange(64) % (size + 1)).astype(np.uint32)
        text = Text(threads=64, smem=2048).fill_shared(1024).add("mov.u32 %r8, sm;")
        text.add(f"mad.lo.u32 %r9, %me, {size}, %r8;", f"mad.wide.u32 %rd1, %me, {size}, %src;")
        text.add("mad.wide.u32 %rd2, %me, 4, %src;", "ld.global.b32 %r7, [%rd2+2048];")
        text.add(f"cp.async.{cache}.shared.global [%r9], [%rd1+1024], {size}, %r7;")
        text.add("cp.async.commit_group;", "cp.async.wait_group 0;")
        data = rng(name).integers(0, 256, 2048).astype(np.uint8).tobytes() + counts.tobytes()
        yield Case("copies", name, text.dump_shared(1024).ptx(), data, 1024, threads=64)


def _atomics() -> Iterator[Case]:
    """Every thread on one of eight words; what the words hold at the end does not depend on the order."""
    for op in (
        "add.u32",
        "min.s32",
        "max.s32",
        "min.u32",
        "max.u32",
        "and.b32",
        "or.b32",
        "xor.b32",
        "add.u64",
    ):
        name, width = f"red.{op}", 8 if op.endswith("64") else 4
        text = Text(threads=128).add("and.b32 %r1, %me, 7;", f"mad.wide.u32 %rd1, %r1, {width}, %dst;")
        text.add(f"mad.wide.u32 %rd2, %me, {width}, %src;")
        register = "%rd3" if width == 8 else "%r2"
        text.add(f"ld.global.b{8 * width} {register}, [%rd2];", f"red.global.{op} [%rd1], {register};")
        yield Case("atomics", name, text.ptx(), _words(name, 256).tobytes(), 64, threads=128)


def _barriers() -> Iterator[Case]:
    """Numbers handed on through shared memory: by named barriers, and by mbarriers with counts and parities."""
    text = Text(threads=128, smem=1024).add("mov.u32 %r8, sm;", "mad.lo.u32 %r9, %me, 4, %r8;")
    text.add("mul.lo.u32 %r1, %me, 3;", "st.shared.b32 [%r9], %r1;", "setp.lt.u32 %p1, %me, 64;", "@%p1 bra FIRST;")
    text.add("bar.arrive 1, 128;", "bra REST;", "FIRST:", "bar.sync 1, 128;", "ld.shared.b32 %r2, [%r9+256];")
    text.add("mad.wide.u32 %rd1, %me, 4, %dst;", "st.global.b32 [%rd1], %r2;", "REST:")
    yield Case("barriers", "named", text.ptx(), bytes(16), 256, threads=128)
    yield from _votes()
    text = Text(threads=64, smem=1024).add("mov.u32 %r8, sm;", "setp.ne.u32 %p1, %me, 0;", "@%p1 bra READY;")
    text.add("mbarrier.init.shared::cta.b64 [%r8], 32;", "mbarrier.init.shared::cta.b64 [%r8+8], 33;", "READY:")
    text.add("bar.sync 0;", "mad.lo.u32 %r9, %me, 4, %r8;", "setp.lt.u32 %p1, %me, 32;", "mov.u32 %r5, 0;")
    text.add("mov.u32 %r6, 0;", "ROUND:", "@%p1 bra TAKE;", "mad.lo.u32 %r1, %r5, 1000, %me;")
    text.add("st.shared.b32 [%r9+128], %r1;", "mbarrier.arrive.shared::cta.b64 _, [%r8];", "bra NEXT;", "TAKE:")
    text.add("{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%r8], %r6; @!p bra WAIT; }")
    text.add("ld.shared.b32 %r2, [%r9+256];", "mad.lo.u32 %r3, %r5, 128, 0;", "cvt.u64.u32 %rd3, %r3;")
    text.add("mad.wide.u32 %rd1, %me, 4, %dst;", "add.u64 %rd1, %rd1, %rd3;", "st.global.b32 [%rd1], %r2;", "NEXT:")
    text.add(
        "bar.sync 0;", "add.u32 %r5, %r5, 1;", "xor.b32 %r6, %r6, 1;", "setp.lt.u32 %p2, %r5, 5;", "@%p2 bra ROUND;"
    )
    yield Case("barriers", "mbarrier", text.ptx(), bytes(16), 640, threads=64)


def _votes() -> Iterator[Case]:
    """Barriers that tell every thread what all threads said; two halves of a CTA at two barriers, several times."""
    text = Text(threads=128, smem=1024).add(
        "shr.u32 %r1, %me, 6;", "add.u32 %r1, %r1, 3;", "mov.u32 %r2, 0;", "mov.u32 %r3, 0;"
    )
    text.add("ROUND:", "add.u32 %r4, %r2, 60;", "setp.eq.u32 %p1, %me, %r4;", "bar.red.or.pred %p2, %r1, 64, %p1;")
    text.add(
        "barrier.cta.red.and.aligned.pred %p3, %r1, 64, !%p1;", "selp.u32 %r5, 1, 0, %p2;", "selp.u32 %r6, 2, 0, %p3;"
    )
    text.add("mad.lo.u32 %r3, %r3, 4, %r5;", "add.u32 %r3, %r3, %r6;", "add.u32 %r2, %r2, 1;")
    text.add(
        "setp.lt.u32 %p4, %r2, 9;", "@%p4 bra ROUND;", "mad.wide.u32 %rd1, %me, 4, %dst;", "st.global.b32 [%rd1], %r3;"
    )
    yield Case("barriers", "votes", text.ptx(), bytes(16), 512, threads=128)


def _cluster() -> Iterator[Case]:
    """Each CTA of a pair writes into the other's shared memory."""
    text = Text(threads=32, smem=1024, cluster=2).add("mov.u32 %r8, sm;", "mov.u32 %r1, %cluster_ctarank;")
    text.add("xor.b32 %r2, %r1, 1;", "mad.lo.u32 %r9, %me, 4, %r8;", "mapa.shared::cluster.u32 %r10, %r9, %r2;")
    text.add("mad.lo.u32 %r3, %r1, 100, %me;", "st.shared::cluster.b32 [%r10], %r3;")
    text.add("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")
    text.add("ld.shared.b32 %r4, [%r9];", "ld.shared::cluster.b32 %r5, [%r10];", "mad.lo.u32 %r6, %r1, 32, %me;")
    text.add("mad.wide.u32 %rd1, %r6, 8, %dst;", "st.global.b32 [%rd1], %r4;", "st.global.b32 [%rd1+4], %r5;")
    text.add("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;")
    yield Case("cluster", "exchange", text.ptx(), bytes(16), 512, grid=2, cluster=2)
