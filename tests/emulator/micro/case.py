"""One micro-kernel: PTX, input bytes, size of the output; and the text that most of them share."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_attn.emulator.tensormap import BYTES as MAP_BYTES

VERSION, TARGET = "8.4", "sm_90a"


@dataclass(frozen=True)
class Map:
    """A tensor map over the input (`where` "in") or output blob, at a byte offset of it. Sizes innermost first."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, without the innermost
    box: tuple[int, ...]
    swizzle: int = 0
    where: str = "in"
    offset: int = 0
    l2: int = 0

    @property
    def box_bytes(self) -> int:
        item = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return math.prod(self.box) * item


@dataclass(frozen=True)
class Case:
    """`unit`: numpy type in which outputs are compared; `ulps`: how far they may be apart (0: bit for bit, but any NaN
    equals any other). `want`: the beginning of the output, where it is known without hardware."""

    family: str
    name: str
    ptx: str
    data: bytes
    out_bytes: int
    unit: str = "u4"
    ulps: int = 0
    threads: int = 32
    grid: int = 1
    cluster: int = 1
    maps: tuple[Map, ...] = ()
    initial: bytes = b""  # of the output; zeros if empty
    want: bytes = b""

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"

    @property
    def digest(self) -> str:
        """Changes with everything that a recorded result depends on."""
        parts = [self.ptx.encode(), self.data, self.initial, repr((self.maps, self.threads, self.grid)).encode()]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@dataclass
class Text:
    """Lines of a kernel with two pointers as parameters (`%src`, `%dst`), any number of maps, and `%me`."""

    threads: int = 32
    smem: int = 0
    maps: int = 0
    cluster: int = 1
    version: str = VERSION
    target: str = TARGET
    lines: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> Text:
        self.lines += lines
        return self

    def fill_shared(self, nbytes: int, offset: int = 0) -> Text:
        """Copy the input from `offset` on into the shared array `sm`."""
        self._pieces(
            "FILL",
            nbytes,
            "cvt.u64.u32 %fd, %fa;",
            "add.u64 %fd, %fd, %src;",
            f"ld.global.v4.b32 {{%f0, %f1, %f2, %f3}}, [%fd+{offset}];",
            "mov.u32 %fs, sm;",
            "add.u32 %fs, %fs, %fa;",
            "st.shared.v4.b32 [%fs], {%f0, %f1, %f2, %f3};",
        )
        return self.add("fence.proxy.async;", "bar.sync 0;")

    def dump_shared(self, nbytes: int, at: int = 0) -> Text:
        """Copy `sm` to the output at byte `at`."""
        self.add("bar.sync 0;")
        return self._pieces(
            "DUMP",
            nbytes,
            "mov.u32 %fs, sm;",
            "add.u32 %fs, %fs, %fa;",
            "ld.shared.v4.b32 {%f0, %f1, %f2, %f3}, [%fs];",
            "cvt.u64.u32 %fd, %fa;",
            "add.u64 %fd, %fd, %dst;",
            f"st.global.v4.b32 [%fd+{at}], {{%f0, %f1, %f2, %f3}};",
        )

    def _pieces(self, label: str, nbytes: int, *lines: str) -> Text:
        """`lines` for every 16 of some bytes, whose offset is %fa."""
        self.add("mul.lo.u32 %fa, %me, 16;", f"{label}:", f"setp.ge.u32 %fp, %fa, {nbytes};", f"@%fp bra {label}ED;")
        return self.add(*lines, f"add.u32 %fa, %fa, {16 * self.threads};", f"bra {label};", f"{label}ED:")

    def ptx(self) -> str:
        params = [".param .u64 p_in", ".param .u64 p_out"]
        params += [f".param .align 64 .b8 p_map{i}[{MAP_BYTES}]" for i in range(self.maps)]
        shared = f".shared .align 1024 .b8 sm[{self.smem}];\n" if self.smem else ""
        cluster = f".explicitcluster\n.reqnctapercluster {self.cluster}, 1, 1\n" if self.cluster > 1 else ""
        body = "\n".join(self.lines)
        return (
            f".version {self.version}\n.target {self.target}\n.address_size 64\n"
            f".visible .entry micro({', '.join(params)})\n.reqntid {self.threads}, 1, 1\n{cluster}{{\n"
            ".reg .pred %p<16>;\n.reg .pred %fp;\n.reg .b16 %h<32>;\n.reg .b32 %r<256>;\n.reg .b64 %rd<64>;\n"
            ".reg .b32 %me, %fa, %fs, %f0, %f1, %f2, %f3;\n.reg .b64 %src, %dst, %fd;\n"
            f"{shared}"
            "ld.param.u64 %src, [p_in];\nld.param.u64 %dst, [p_out];\n"
            "cvta.to.global.u64 %src, %src;\ncvta.to.global.u64 %dst, %dst;\nmov.u32 %me, %tid.x;\n"
            f"{body}\nret;\n}}\n"
        )


def rng(name: str) -> np.random.Generator:
    """Numbers of their own for every case, the same on every machine."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


_INT_EDGES = (0, 1, 2, -1, -2, 7, 31, 32, 33, 63, 64, 255, 256, 0x7F, 0x80, 0x8000, 0x7FFF, 0xFFFF)
_F32_EDGES = (  # bits
    "00000000 80000000 00000001 80000001 007FFFFF 00800000 3F800000 BF800000 "  # zeros, subnormals, 1
    "7F7FFFFF FF7FFFFF 7F800000 FF800000 7FC00000 3F7FFFFF 3F800001 3F808000 3F818000 "  # ends, beside 1, ties
    "477FE000 477FF000 38800000 33800000 33000000 43E00000 43E80000 43F00000 47600000 47700000"  # of narrow formats
)


def values(kind: str, count: int, source: np.random.Generator) -> np.ndarray[Any, Any]:
    """`count` items of a PTX type as raw bits: edges first, then random ones."""
    width = int(kind.lstrip("befus").replace("16x2", "32").replace("32x2", "64") or 0) // 8
    if kind == "f32":
        magnitude = source.standard_normal(count) * 2.0 ** source.integers(-20, 20, count)
        bits = magnitude.astype(np.float32).view(np.uint32)
        bits[::3] = source.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)[::3]
        edges = np.array([int(bits, 16) for bits in _F32_EDGES.split()], np.uint32)
    elif kind == "f64":
        bits = (source.standard_normal(count) * 2.0 ** source.integers(-60, 60, count)).view(np.uint64)
        edges = np.array([0, 1 << 63, 0x3FF0000000000000, 0x7FF0000000000000, 0x7FF8000000000000], np.uint64)
    elif kind in ("f16x2", "bf16x2"):
        halves = (source.standard_normal(2 * count) * 2.0 ** source.integers(-6, 6, 2 * count)).astype(np.float32)
        raw = (
            halves.astype(np.float16).view(np.uint16)
            if kind == "f16x2"
            else (halves.view(np.uint32) >> 16).astype(np.uint16)
        )
        bits, edges = raw.view(np.uint32), np.array([0, 0x80008000, 0x00010001, 0x7C007C00, 0x3C003C00], np.uint32)
        if kind == "bf16x2":
            edges = np.array([0, 0x80008000, 0x3F803F80, 0x7F807F80], np.uint32)
    else:
        top = 1 << (8 * width)
        bits = (
            source.integers(0, top, count, dtype=np.uint64, endpoint=False)
            if width < 8
            else source.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        )
        bits = bits.astype(f"u{width}")
        bits[1::4] >>= np.array(4 * width, bits.dtype)
        edges = np.array([e % top for e in (*_INT_EDGES, top // 2, top // 2 - 1, top - 1)], np.uint64).astype(
            f"u{width}"
        )
    bits = np.array(bits)
    some = min(len(edges), count)
    bits[:some] = source.permutation(edges)[:some]
    return bits


def elementwise(
    family: str,
    name: str,
    code: Sequence[str],
    sources: Sequence[str],
    result: str,
    *,
    count: int = 512,
    unit: str = "",
    ulps: int = 0,
    data: Sequence[np.ndarray[Any, Any]] | None = None,
    **options: str,
) -> Case:
    """A thread an item: `code` finds its inputs in %a0, %a1, ... and leaves the result in %d. `options`: of `Text`."""
    source = rng(f"{family}/{name}")
    arrays = list(data) if data is not None else [values(kind, count, source) for kind in sources]
    text = Text(threads=count, **options)  # type: ignore[arg-type]
    registers = [f".reg .b{_register_bits(kind)} %a{i};" for i, kind in enumerate(sources)]
    text.add(*registers, f".reg .b{_register_bits(result)} %d;", ".reg .b64 %at;")
    offset = 0
    for i, array in enumerate(arrays):
        size = array.dtype.itemsize
        text.add(f"mad.wide.u32 %at, %me, {size}, %src;", f"ld.global.b{8 * size} %a{i}, [%at+{offset}];")
        offset += -(-array.nbytes // 16) * 16
    size = _bits(result) // 8
    text.add(*code, f"mad.wide.u32 %at, %me, {size}, %dst;", f"st.global.b{8 * size} [%at], %d;")
    blob = b"".join(a.tobytes().ljust(-(-a.nbytes // 16) * 16, b"\0") for a in arrays)
    return Case(family, name, text.ptx(), blob, size * count, unit or f"u{size}", ulps, count)


def _bits(kind: str) -> int:
    return {"f16x2": 32, "bf16x2": 32, "pred": 32}.get(kind) or int(kind.lstrip("befus"))


def _register_bits(kind: str) -> int:
    return max(_bits(kind), 16)
