"""Memory forms that Blackwell adds: rows gathered and scattered by TMA, accesses of 256 bits. No golden holds them yet:
every case comes with the bytes that the PTX ISA asks for, worked out here in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulator.micro.case import Case, Map, Text, rng

Array = np.ndarray[Any, Any]
VERSION, TARGET = "8.8", "sm_100a"
SPAN = {0: 64, 1: 32, 2: 64, 3: 128}  # bytes of a row by swizzle
ROWS, PITCH, WIDTH = 50, 208, 200  # of the tensor: bytes between rows, bytes of a row
SMEM = 1024


@dataclass(frozen=True)
class Known:
    """A case and the beginning of its output, as far as it is known."""

    case: Case
    want: bytes

    @property
    def id(self) -> str:
        return self.case.id


def memory_cases() -> Iterator[Known]:
    yield from _gathers()
    yield from _scatters()
    yield from _wide()
    yield from _transposed_bytes()
    yield from _maps()


def text(version: str = VERSION, **options: Any) -> Text:
    return Text(version=version, target=TARGET, **options)


# --- gather4, scatter4 ------------------------------------------------------------------------------------------------


def tensor(swizzle: int, dtype: str = "bfloat16", where: str = "in", box_rows: int = 1) -> Map:
    item = {"uint8": 1, "bfloat16": 2, "float32": 4}[dtype]
    return Map(dtype, (WIDTH // item, ROWS), (PITCH,), (SPAN[swizzle] // item, box_rows), swizzle, where)


def _image(data: Array, swizzle: int, start: int, rows: tuple[int, ...]) -> Array:
    """Shared memory after rows, from byte `start` of each, were loaded one behind another; zeros outside the tensor."""
    span = SPAN[swizzle]
    image = np.zeros(4 * span, np.uint8)
    for place, row in enumerate(rows):
        for byte in range(span):
            at = place * span + byte
            inside = 0 <= row < ROWS and 0 <= start + byte < WIDTH
            image[_swizzled(at, swizzle)] = data[row * PITCH + start + byte] if inside else 0
    return image


def _swizzled(at: int, swizzle: int) -> int:
    """Where a byte lies: the number of its 16-byte unit in its 128-byte line is XORed with the line's."""
    line, unit = at // 128, at // 16 % 8
    return line * 128 + (unit ^ line % (1 << swizzle)) * 16 + at % 16


GATHER = "cp.async.bulk.tensor.2d{space}.global.tile::gather4.mbarrier::complete_tx::bytes{more}"
TILE = "cp.async.bulk.tensor.2d{space}.global.tile.mbarrier::complete_tx::bytes{more}"
PLACES = ((0, (3, 0, 49, 7)), (64, (9, 9, 2, 1)), (16, (-1, 50, 4, 1000)), (160, (5, 6, 7, 8)), (-32, (1, 2, 3, 4)))


def _gathers() -> Iterator[Known]:
    for swizzle in SPAN:
        for number, (start, rows) in enumerate(PLACES):
            yield gather(f"gather4.sw{swizzle}.{number}", tensor(swizzle), start, rows)
    for dtype in ("uint8", "float32"):
        yield gather(f"gather4.{dtype}", tensor(3, dtype), 32, (40, 3, 20, 1))
    for space, more in (
        (".shared::cta", ".L2::cache_hint"),
        (".shared::cta", ".cta_group::1"),
        (".shared::cta", ".cta_group::2.L2::cache_hint"),
        (".shared::cluster", ""),
        (".shared::cluster", ".L2::cache_hint"),
        (".shared::cluster", ".L2::cache_hint.cta_group::2"),
    ):
        yield gather(f"gather4{space}{more}", tensor(3), 64, (9, 30, 2, 1), space, more)
    yield _pair("gather4.pair", GATHER, ".cta_group::2")
    yield _pair("gather4.multicast", GATHER, ".multicast::cluster")
    yield _pair("gather4.multicast.pair", GATHER, ".multicast::cluster.cta_group::2.L2::cache_hint")
    yield _pair("tile.pair", TILE, ".L2::cache_hint.cta_group::2")
    yield _pair("tile.multicast.pair", TILE, ".multicast::cluster.cta_group::2")


def _data(name: str) -> Array:
    return rng(name).integers(0, 256, ROWS * PITCH).astype(np.uint8)


def gather(
    name: str, source: Map, start: int, rows: tuple[int, ...], space: str = ".shared::cta", more: str = ""
) -> Known:
    item = {"uint8": 1, "bfloat16": 2, "float32": 4}[source.dtype]
    nbytes = 4 * SPAN[source.swizzle]
    kernel = text(threads=128, smem=SMEM, maps=1).add(*_SETUP, "setp.ne.u32 %p1, %me, 0;", "@%p1 bra READY;")
    kernel.add("mbarrier.init.shared::cta.b64 [%r9], 1;", "fence.mbarrier_init.release.cluster;")
    kernel.add("fence.proxy.async;", f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {nbytes};")
    policy = ", %rd7" if "cache_hint" in more else ""
    form = GATHER.format(space=space, more=more)
    kernel.add(f"{form} [%r8], [%rd1, {{{_place(start // item, rows)}}}], [%r9]{policy};")
    kernel.add("READY:", "bar.sync 0;", *WAIT).dump_shared(nbytes)
    data = _data(name)
    want = _image(data, source.swizzle, start, rows).tobytes()
    case = Case("gather4", name, kernel.ptx(), data.tobytes(), nbytes, "u1", threads=128, maps=(source,))
    return Known(case, want)


_SETUP = (
    "mov.u32 %r8, sm;",
    f"add.u32 %r9, %r8, {SMEM - 16};",
    "mov.b64 %rd1, p_map0;",
    "cvta.param.u64 %rd1, %rd1;",
    "mov.b64 %rd7, 0;",
    "mov.u32 %r6, 0;",
)
WAIT = ("WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], %r6;", "@!%p2 bra WAIT;")


def _place(column: int, rows: tuple[int, ...]) -> str:
    return ", ".join(map(str, (column, *rows)))


def _pair(name: str, form: str, more: str) -> Known:
    """Two CTAs. Multicast: the odd one loads for both. Otherwise each loads rows of its own. With .cta_group::2 the
    bytes of both are counted by the even one's barrier, else by those of the receivers."""
    multicast, group = ".multicast" in more, ".cta_group::2" in more
    nbytes, rows = 512, ((3, 1, 41, 5), (9, 30, 2, 1)) if form == GATHER else ((3, 4, 5, 6), (48, 49, 50, 51))
    kernel = text(threads=128, smem=SMEM, maps=1, cluster=2).add(*_SETUP, "mov.u32 %r10, %cluster_ctarank;")
    kernel.add("setp.eq.u32 %p3, %r10, 0;", "setp.eq.u32 %p1, %me, 0;", "mov.b16 %h1, 3;", "mov.u32 %r12, %r9;")
    expected = (2 if group else 1) * nbytes
    if group:
        kernel.add("mov.u32 %r11, 0;", "mapa.shared::cluster.u32 %r12, %r9, %r11;")
    kernel.add("@!%p1 bra SET;", "mbarrier.init.shared::cta.b64 [%r9], 1;", "fence.mbarrier_init.release.cluster;")
    kernel.add(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {expected};", "fence.proxy.async;", "SET:")
    kernel.add("barrier.cluster.arrive;", "barrier.cluster.wait;")
    opcode = form.format(space=".shared::cluster", more=more)
    extra = (", %h1" if multicast else "") + (", %rd7" if "cache_hint" in more else "")
    for rank in (1,) if multicast else (0, 1):
        place = _place(32, rows[rank] if form == GATHER else rows[rank][:1])
        kernel.add(f"setp.eq.and.u32 %p4, %r10, {rank}, %p1;")
        kernel.add(f"@%p4 {opcode} [%r8], [%rd1, {{{place}}}], [%r12]{extra};")
    # with one barrier for both, the other CTA waits through the cluster's barrier
    kernel.add(*(["@!%p3 bra WAITED;"] if group else []), *WAIT, "WAITED:")
    kernel.add("barrier.cluster.arrive;", "barrier.cluster.wait;", f"mul.wide.u32 %rd8, %r10, {nbytes};")
    kernel.add("add.u64 %dst, %dst, %rd8;").dump_shared(nbytes)
    data = _data(name)
    loaded = (rows[1], rows[1]) if multicast else rows
    want = b"".join(_image(data, 3, 64, own).tobytes() for own in loaded)
    source = tensor(3, box_rows=1 if form == GATHER else 4)
    options: dict[str, Any] = {"threads": 128, "grid": 2, "cluster": 2, "maps": (source,)}
    return Known(Case("gather4", name, kernel.ptx(), data.tobytes(), 2 * nbytes, "u1", **options), want)


SCATTER = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"


def _scatters() -> Iterator[Known]:
    for swizzle in SPAN:
        for number, (start, rows) in enumerate(((0, (3, 0, 49, 7)), (160, (5, 60, 2, 50)))):
            yield scatter(f"scatter4.sw{swizzle}.{number}", tensor(swizzle, where="out"), start, rows)
    yield scatter("scatter4.hint", tensor(3, where="out"), 64, (5, 60, 2, 50), ".L2::cache_hint")


def scatter(name: str, target: Map, start: int, rows: tuple[int, ...], hint: str = "") -> Known:
    item = {"uint8": 1, "bfloat16": 2, "float32": 4}[target.dtype]
    kernel = text(threads=128, smem=SMEM, maps=1).fill_shared(SMEM).add(*_SETUP, "setp.ne.u32 %p1, %me, 0;")
    policy = ", %rd7" if hint else ""
    kernel.add("@%p1 bra DONE;", f"{SCATTER}{hint} [%rd1, {{{_place(start // item, rows)}}}], [%r8]{policy};")
    kernel.add("cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", "DONE:")
    data, initial = rng(name).integers(0, 256, SMEM).astype(np.uint8), _data(name + "o")
    want, span = initial.copy(), SPAN[target.swizzle]
    for place, row in enumerate(rows):
        for byte in range(span):
            if row < ROWS and start + byte < -(-WIDTH // 16) * 16:  # the last 16-byte unit of a line is written whole
                want[row * PITCH + start + byte] = data[_swizzled(place * span + byte, target.swizzle)]
    options: dict[str, Any] = {"threads": 128, "maps": (target,), "initial": initial.tobytes()}
    case = Case("scatter4", name, kernel.ptx(), data.tobytes(), len(initial), "u1", **options)
    return Known(case, want.tobytes())


# --- 256 bits ---------------------------------------------------------------------------------------------------------

_WORDS = "{" + ", ".join(f"%r{10 + i}" for i in range(8)) + "}"
_LONGS = "{" + ", ".join(f"%rd{10 + i}" for i in range(4)) + "}"
WIDE_LOADS = (
    "ld.global.v8.b32",
    "ld.global.v8.f32",
    "ld.global.v8.s32",
    "ld.global.v4.b64",
    "ld.global.v4.f64",
    "ld.global.nc.v8.b32",
    "ld.global.nc.L1::no_allocate.L2::evict_first.L2::256B.v4.u64",
    "ld.global.L1::no_allocate.v8.f32",
    "ld.global.L1::evict_last.L2::evict_last.v8.f32",
    "ld.global.L2::cache_hint.v8.b32",
    "ld.global.cg.v8.u32",
    "ld.weak.global.v8.b32",
    "ld.relaxed.gpu.global.v8.b32",
    "ld.volatile.global.v4.b64",
    "ld.v8.b32",
)
WIDE_STORES = (
    "st.global.v8.b32",
    "st.global.v8.f32",
    "st.global.v8.u32",
    "st.global.v4.b64",
    "st.global.v4.f64",
    "st.global.L1::no_allocate.v8.b32",
    "st.global.L1::evict_last.L2::evict_first.v8.f32",
    "st.global.L1::no_allocate.L2::cache_hint.v4.b64",
    "st.global.cs.v8.b32",
    "st.weak.global.v8.b32",
    "st.relaxed.gpu.global.v8.b32",
    "st.volatile.global.v4.u64",
    "st.v8.b32",
    "st.v4.b64",
)


def wide(form: str, sinks: tuple[int, ...] = (), offset: int = 0) -> Known:
    """32 threads move 32 bytes each: the form on one side, single words on the other. `sinks`: items that are `_`."""
    four = form.rpartition(".v")[2].startswith("4")
    listed = [f"%rd{10 + i}" for i in range(4)] if four else [f"%r{10 + i}" for i in range(8)]
    words = "{" + ", ".join("_" if i in sinks else register for i, register in enumerate(listed)) + "}"
    load, policy = form.startswith("ld"), ", %rd7" if "cache_hint" in form else ""
    size = 8 if four else 4
    zeros = [f"mov.b{8 * size} {register}, 0;" for register in listed]
    kernel = text().add("mov.b64 %rd7, 0;", *zeros, "mad.wide.u32 %rd1, %me, 32, %src;")
    kernel.add("mad.wide.u32 %rd2, %me, 32, %dst;")
    if load:
        kernel.add(f"{form} {words}, [%rd1+{offset}]{policy};")
        kernel.add(*(f"st.global.b{8 * size} [%rd2+{size * i}], {listed[i]};" for i in range(len(listed))))
    else:
        kernel.add(*(f"ld.global.b{8 * size} {listed[i]}, [%rd1+{size * i}];" for i in range(len(listed))))
        kernel.add(f"{form} [%rd2+{offset}], {words}{policy};")
    name = form + "".join(f".{i}" for i in sinks)
    data, initial = (rng(x).integers(0, 256, 1024).astype(np.uint8) for x in (name, name + "o"))
    want = data.reshape(32, -1, size).copy()
    if sinks:
        want[:, list(sinks)] = 0 if load else initial.reshape(want.shape)[:, list(sinks)]
    case = Case("wide", name, kernel.ptx(), data.tobytes(), 1024, "u1", initial=initial.tobytes())
    return Known(case, want.tobytes())


def _wide() -> Iterator[Known]:
    for form in (*WIDE_LOADS, *WIDE_STORES):
        yield wide(form)
    for form, sinks in (
        ("ld.global.v8.b32", (1, 6)),
        ("ld.global.v4.b64", (0,)),
        ("st.global.v8.b32", (1, 6)),
        ("st.global.v4.b64", (0, 3)),
    ):
        yield wide(form, sinks)


# --- ldmatrix of bytes -----------------------------------------------------------------------------------------------


def _transposed_bytes() -> Iterator[Known]:
    """Rows of 16 bytes at addresses in a shuffled order: 16 of each matrix, lane l % 16 naming row l % 16."""
    for count in (1, 2):
        name = f"ldmatrix.m16n16.x{count}"
        rows = rng(name).permutation(64)[:32].astype(np.uint32)
        kernel = text(threads=32, smem=2048).fill_shared(1024)
        kernel.add("mad.wide.u32 %rd1, %me, 4, %src;", "ld.global.b32 %r9, [%rd1+1024];", "mov.u32 %r8, sm;")
        words = [f"%r{i}" for i in range(2 * count)]
        kernel.add(
            "mad.lo.u32 %r9, %r9, 16, %r8;",
            f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{', '.join(words)}}}, [%r9];",
            f"mad.wide.u32 %rd2, %me, {8 * count}, %dst;",
            *(f"st.global.b32 [%rd2+{4 * i}], {word};" for i, word in enumerate(words)),
        )
        data = rng(name).integers(0, 256, 1024).astype(np.uint8)
        want = np.zeros((32, 2 * count, 4), np.uint8)
        for lane, word, byte in np.ndindex(want.shape):
            row = rows[word // 2 * 16 + lane % 4 * 4 + byte]
            want[lane, word, byte] = data[row * 16 + lane // 4 + word % 2 * 8]
        case = Case("matrix", name, kernel.ptx(), data.tobytes() + rows.tobytes(), want.size)
        yield Known(case, want.tobytes())


# --- tensormap.replace ------------------------------------------------------------------------------------------------

# What makes a map of boxes of 4 rows like `tensor(3, box_rows=4)`, but for its address.
_FIELDS = (
    ("elemtype", "", "10", "b32"),
    ("swizzle_mode", "", "3", "b32"),
    ("fill_mode", "", "0", "b32"),
    ("interleave_layout", "", "0", "b32"),
    ("rank", "", "1", "b32"),
    ("box_dim", "0, ", "64", "b32"),
    ("box_dim", "1, ", "%r7", "b32"),
    ("global_dim", "0, ", f"{WIDTH // 2}", "b32"),
    ("global_dim", "1, ", f"{ROWS}", "b32"),
    ("global_stride", "0, ", "%rd3", "b64"),
    ("element_stride", "1, ", "1", "b32"),
    ("swizzle_atomicity", "", "0", "b32"),
)
MAP_AT = 64 * 1024  # of a map in the output, behind what the kernel writes there


def changed_map(name: str, space: str, start: str, acquire: bool = True) -> Known:
    """One thread makes a map, from zeros or from another map, in shared or in global memory; then a box is loaded."""
    first = Map("uint8", (64, 8), (64,), (16, 2))
    kernel = text(threads=128, smem=SMEM, maps=1).add(*_SETUP, "mov.b32 %r7, 4;", f"mov.b64 %rd3, {PITCH};")
    kernel.add(f"add.u64 %rd4, %dst, {MAP_AT};", "mov.u32 %r13, sm;", "add.u32 %r13, %r13, 512;", "mov.b32 %r14, 0;")
    kernel.add("cvt.u64.u32 %rd6, %r13;", "cvta.shared.u64 %rd6, %rd6;", "setp.ne.u32 %p1, %me, 0;")
    kernel.add("@%p1 bra MADE;", "mov.b64 %rd5, p_map0;", "cvta.param.u64 %rd5, %rd5;")
    for at in range(0, 128, 4):  # the map to begin with
        source = f"ld.param.b32 %r14, [p_map0+{at}];" if start == "map" else ""
        store = f"st.global.b32 [%rd4+{at}], %r14;" if space == ".global" else f"st.shared.b32 [%r13+{at}], %r14;"
        kernel.add(source, store)
    base = {".global": "%rd4", ".shared::cta": "%r13", "": "%rd6"}[space]
    kernel.add(f"tensormap.replace.tile.global_address{space}.b1024.b64 [{base}], %src;")
    kernel.add(*(f"tensormap.replace.tile.{f}{space}.b1024.{kind} [{base}], {o}{v};" for f, o, v, kind in _FIELDS))
    kernel.add("mbarrier.init.shared::cta.b64 [%r9], 1;", "fence.mbarrier_init.release.cluster;", "fence.proxy.async;")
    kernel.add("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 512;", "MADE:", "bar.sync 0;")
    kernel.add("setp.ge.u32 %p3, %me, 32;", "@%p3 bra READY;")
    release = ".tensormap::generic.release.gpu.sync.aligned [%rd4], [%r13], 128;"
    fence = "fence.proxy.tensormap::generic.release.gpu;"
    kernel.add(fence if space == ".global" else f"tensormap.cp_fenceproxy.global.shared::cta{release}")
    kernel.add("@%p1 bra READY;", "fence.proxy.tensormap::generic.acquire.gpu [%rd4], 128;" if acquire else "")
    kernel.add(f"{TILE.format(space='.shared::cta', more='')} [%r8], [%rd4, {{32, 7}}], [%r9];")
    kernel.add("READY:", "bar.sync 0;", *WAIT).dump_shared(512)
    data = _data(name)
    out_bytes = MAP_AT + 128
    want = _image(data, 3, 64, (7, 8, 9, 10)).tobytes()
    case = Case("tensormap", name, kernel.ptx(), data.tobytes(), out_bytes, "u1", threads=128, maps=(first,))
    return Known(case, want)


def _maps() -> Iterator[Known]:
    for space in (".global", ".shared::cta", ""):
        for start in ("map", "zeros"):
            yield changed_map(f"tensormap{space}.{start}", space, start)
