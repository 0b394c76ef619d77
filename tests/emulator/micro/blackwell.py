"""Memory forms that Blackwell adds: TMA loads of CTA pairs, stores of 256 bits, ldmatrix of bytes. No golden holds them
yet: every case comes with the bytes that the PTX ISA asks for, worked out here in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cute_attn.emulator.dtypes import Array
from tests.emulator.micro.case import Case, Map, Text, rng
from tests.emulator.micro.collective import load_lane, store_lane

VERSION, TARGET = "8.8", "sm_100a"
SPAN = 128  # bytes of a row of a box
ROWS, PITCH, WIDTH = 50, 208, 200  # of the tensor: bytes between rows, bytes of a row
SMEM = 1024


def memory_cases() -> Iterator[Case]:
    for more in (".L2::cache_hint.cta_group::2", ".cta_group::2.L2::cache_hint"):
        yield _pair(f"tile.pair{more}", more)
    yield from map(wide, WIDE_STORES)
    yield from _transposed_bytes()


def text(version: str = VERSION, **options: Any) -> Text:
    return Text(version=version, target=TARGET, **options)


# --- loads of CTA pairs ---------------------------------------------------------------------------------------------


def _image(data: Array, start: int, first: int) -> Array:
    """Shared memory after a box of 4 rows, from byte `start` of row `first`, was loaded; zeros outside the tensor."""
    image = np.zeros(4 * SPAN, np.uint8)
    for at in range(4 * SPAN):
        row, byte = first + at // SPAN, start + at % SPAN
        inside = 0 <= row < ROWS and 0 <= byte < WIDTH
        image[_swizzled(at)] = data[row * PITCH + byte] if inside else 0
    return image


def _swizzled(at: int) -> int:
    """Where a byte lies: the number of its 16-byte unit in its 128-byte line is XORed with the line's."""
    line, unit = at // 128, at // 16 % 8
    return line * 128 + (unit ^ line % 8) * 16 + at % 16


TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_SETUP = (
    "mov.u32 %r8, sm;",
    f"add.u32 %r9, %r8, {SMEM - 16};",
    "mov.b64 %rd1, p_map0;",
    "cvta.param.u64 %rd1, %rd1;",
    "mov.b64 %rd7, 0;",
    "mov.u32 %r6, 0;",
)
WAIT = ("WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], %r6;", "@!%p2 bra WAIT;")


def _pair(name: str, more: str) -> Case:
    """Two CTAs load rows of their own. The bytes of both are counted by the even one's barrier."""
    nbytes, firsts = 4 * SPAN, (3, 48)
    kernel = text(threads=128, smem=SMEM, maps=1, cluster=2).add(*_SETUP, "mov.u32 %r10, %cluster_ctarank;")
    kernel.add("setp.eq.u32 %p3, %r10, 0;", "setp.eq.u32 %p1, %me, 0;")
    kernel.add("mov.u32 %r11, 0;", "mapa.shared::cluster.u32 %r12, %r9, %r11;")
    kernel.add("@!%p1 bra SET;", "mbarrier.init.shared::cta.b64 [%r9], 1;", "fence.mbarrier_init.release.cluster;")
    kernel.add(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {2 * nbytes};", "fence.proxy.async;", "SET:")
    kernel.add("barrier.cluster.arrive;", "barrier.cluster.wait;")
    for rank in (0, 1):
        kernel.add(f"setp.eq.and.u32 %p4, %r10, {rank}, %p1;")
        kernel.add(f"@%p4 {TILE}{more} [%r8], [%rd1, {{32, {firsts[rank]}}}], [%r12], %rd7;")
    # with one barrier for both, the other CTA waits through the cluster's barrier
    kernel.add("@!%p3 bra WAITED;", *WAIT, "WAITED:")
    kernel.add("barrier.cluster.arrive;", "barrier.cluster.wait;", f"mul.wide.u32 %rd8, %r10, {nbytes};")
    kernel.add("add.u64 %dst, %dst, %rd8;").dump_shared(nbytes)
    data = rng(name).integers(0, 256, ROWS * PITCH).astype(np.uint8)
    want = b"".join(_image(data, 64, first).tobytes() for first in firsts)
    source = Map("bfloat16", (WIDTH // 2, ROWS), (PITCH,), (SPAN // 2, 4), 3, "in")
    options: dict[str, Any] = {"threads": 128, "grid": 2, "cluster": 2, "maps": (source,)}
    return Case("pair", name, kernel.ptx(), data.tobytes(), 2 * nbytes, "u1", want=want, **options)


# --- 256 bits ---------------------------------------------------------------------------------------------------------

WIDE_STORES = ("st.global.v8.b32", "st.global.v8.f32")


def wide(form: str, offset: int = 0) -> Case:
    """32 threads move 32 bytes each: by single words from global memory, by one store back."""
    kernel = load_lane(text(), 8).add("mad.wide.u32 %rd2, %me, 32, %dst;")
    kernel.add(f"{form} [%rd2+{offset}], {{{', '.join(f'%r{i}' for i in range(8))}}};")
    data, initial = (rng(x).integers(0, 256, 1024).astype(np.uint8) for x in (form, form + "o"))
    known = {"initial": initial.tobytes(), "want": data.tobytes()}
    return Case("wide", form, kernel.ptx(), data.tobytes(), 1024, "u1", **known)


# --- ldmatrix of bytes -----------------------------------------------------------------------------------------------


def _transposed_bytes() -> Iterator[Case]:
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
        )
        store_lane(kernel, *words)
        data = rng(name).integers(0, 256, 1024).astype(np.uint8)
        want = np.zeros((32, 2 * count, 4), np.uint8)
        for lane, word, byte in np.ndindex(want.shape):
            row = rows[word // 2 * 16 + lane % 4 * 4 + byte]
            want[lane, word, byte] = data[row * 16 + lane // 4 + word % 2 * 8]
        yield Case("matrix", name, kernel.ptx(), data.tobytes() + rows.tobytes(), want.size, want=want.tobytes())
