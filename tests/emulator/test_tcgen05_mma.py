"""tcgen05.mma, cp and commit: small integers through every layout, against a product of matrices in numpy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import MemoryFault, ProxyFault, PtxError, Race, Uninitialised
from tests.emulator.micro.blackwell_values import finite_codes, level, width
from tests.emulator.tcgen05_kernel import Kernel
from tests.emulator.umma_oracle import BITS, Placed, a_places, d_places, instruction, put_scales, scaled_instruction

pytestmark = pytest.mark.emulator

A_COLUMN, D_COLUMN, SFA_COLUMN, SFB_COLUMN = 0, 64, 16, 32  # of tensor memory
B_START = 64 << 10  # in the shared image
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "ue8m0": torch.float8_e8m0fnu}


def numbers(rng: np.random.Generator, type_: str, shape: tuple[int, ...]) -> Array:
    """Values that the type has, small enough that sums are exact."""
    if type_ in ("u8", "s8"):
        low, high = (0, 256) if type_ == "u8" else (-128, 128)
        return rng.integers(low, high, shape).astype(np.float64)
    table = {
        "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
        "e2m3": [0, 0.125, 0.875, 1, 1.125, 2.5, 7.5],
        "e3m2": [0, 0.0625, 0.25, 1.75, 12, 28],
    }.get(type_, [0, 1, 2, 3, 4, 5, 6, 7])
    return rng.choice(np.array(table), shape) * rng.choice([-1.0, 1.0], shape)


def encoded(x: Array, type_: str) -> Array:
    """Bytes of items [..., unit]; items of 4 and 6 bits stay codes in a byte."""
    if type_ in ("f16", "bf16"):
        dtype = torch.float16 if type_ == "f16" else torch.bfloat16
        words = torch.from_numpy(x).to(dtype).view(torch.int16).numpy()
    elif type_ == "tf32":
        words = x.astype(np.float32).view(np.uint32) | 0x1555  # bits that do not count
    elif type_ in FLOAT8:
        words = torch.from_numpy(x).to(FLOAT8[type_]).view(torch.uint8).numpy()
    elif type_ in ("u8", "s8"):
        words = x.astype(np.int64).astype(np.uint8)
    else:
        words = _small_codes(x, type_)
    return np.ascontiguousarray(words)[..., None].view(np.uint8).reshape(*x.shape, -1)


def _small_codes(x: Array, type_: str) -> Array:
    table = [float(level(code, type_)) for code in range(finite_codes(type_))]
    codes = np.array([table.index(v) for v in np.abs(x).ravel()]).reshape(x.shape)
    return (codes | np.signbit(x) << (width(type_) - 1)).astype(np.uint8)


def row_bytes(x: Array, type_: str, dense: bool) -> Array:
    """Items of each row as they lie in 32 bytes: [rows, 32]. Small ones fill the start of 16 bytes, 16 at a time."""
    raw = encoded(x, type_)
    width = BITS[type_]
    if width >= 8:
        return raw.reshape(len(x), -1)
    codes = raw[..., 0]
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :width]
    if dense:
        return np.packbits(bits.reshape(len(x), -1), axis=-1, bitorder="little")
    packed = np.packbits(bits.reshape(len(x), -1, 16 * width), axis=-1, bitorder="little")
    return np.concatenate([packed, np.full((*packed.shape[:2], 16 - 2 * width), 0xEE, np.uint8)], -1).reshape(
        len(x), -1
    )


@dataclass(frozen=True)
class Case:
    kind: str = "f16"
    a: str = "f16"
    b: str = "f16"
    d: str = "f32"
    m: int = 128
    n: int = 64
    a_mode: str = "128"
    b_mode: str = "128"
    a_mn: bool = False
    b_mn: bool = False
    group: int = 1
    a_in_tmem: bool = False
    slice: int = 0
    lane: int = 0
    keep: bool = True
    negate: int = 0
    shift: int = 0
    scale: str = ""  # type of the factors
    vector: int = 0
    ids: tuple[int, int] = (0, 0)

    @property
    def k(self) -> int:
        return 64 if self.kind.startswith("mxf4") else 256 // max(BITS[self.a], 8)

    @property
    def unit(self) -> int:
        return max(BITS[self.a], 8) // 8


class Setup:
    """Matrices of a case, in the images of a kernel."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(7)
        self.left, self.right = numbers(rng, case.a, (case.m, case.k)), numbers(rng, case.b, (case.n, case.k))
        self.before = rng.integers(-50, 50, (case.m, case.n)).astype(np.float64)
        self.smem = rng.integers(0, 255, (case.group, 2 * B_START)).astype(np.uint8)
        self.tmem = np.full((case.group, 128, D_COLUMN + case.n), 0x7FC00000, np.uint32)
        rows, columns = case.m // case.group, case.n // case.group
        self.a = Placed(case.a_mode, case.a_mn, case.unit, rows, 0, case.slice)
        self.b = Placed(case.b_mode, case.b_mn, case.unit, columns, B_START, case.slice)
        for cta in range(case.group):
            self._put_a(cta, self.left[cta * rows : (cta + 1) * rows])
            self._shared(cta, self.b, self.right[cta * columns : (cta + 1) * columns], case.b)
            self._put_d(cta, self.before[cta * rows : (cta + 1) * rows])
        if case.vector:
            self._put_scales(rng)

    def _shared(self, cta: int, place: Placed, x: Array, type_: str) -> None:
        raw = row_bytes(x, type_, self.case.kind.startswith("mxf4"))
        place.put(self.smem[cta], raw.reshape(len(x), -1, place.unit))

    def _put_a(self, cta: int, x: Array) -> None:
        if not self.case.a_in_tmem:
            self._shared(cta, self.a, x, self.case.a)
            return
        raw = np.ascontiguousarray(row_bytes(x, self.case.a, self.case.kind.startswith("mxf4"))).view(np.uint32)
        for lanes in a_places(self.case.m, self.case.group):
            self.tmem[cta][self.case.lane + lanes, A_COLUMN : A_COLUMN + 8] = raw

    def _put_d(self, cta: int, x: Array) -> None:
        lanes, columns = d_places(self.case.m, self.case.n, self.case.group)
        self.tmem[cta][self.case.lane + lanes, D_COLUMN + columns] = self._words(x)

    def _words(self, x: Array) -> Array:
        if self.case.d == "s32":
            return x.astype(np.int32).view(np.uint32)
        if self.case.d == "f16":
            return x.astype(np.float16).view(np.uint16).astype(np.uint32)
        return x.astype(np.float32).view(np.uint32)

    def _put_scales(self, rng: np.random.Generator) -> None:
        case = self.case
        count, rows = case.k // case.vector, case.m // case.group
        choices = [0.5, 1, 2, 4] if case.scale == "ue8m0" else [0.5, 1, 1.5, 3]
        factors = [rng.choice(choices, (size, count)) for size in (case.m, case.n)]
        codes = [encoded(f, "ue8m0" if case.scale == "ue8m0" else "e4m3")[..., 0] for f in factors]
        self.tmem[:, :, SFA_COLUMN : SFB_COLUMN + 16] = 0xFFFFFFFF
        for cta in range(case.group):
            mine = codes[0][cta * rows : (cta + 1) * rows]
            put_scales(self.tmem[cta], SFA_COLUMN, mine, case.ids[0], False)
            put_scales(self.tmem[cta], SFB_COLUMN, codes[1], case.ids[1], rows == 64)
        self.left = self.left * np.repeat(factors[0], case.vector, axis=1)
        self.right = self.right * np.repeat(factors[1], case.vector, axis=1)

    def word(self) -> int:
        c = self.case
        if c.vector:
            return scaled_instruction(c.m, c.n, c.a, c.b, c.scale, *c.ids, c.kind != "mxf8f6f4")
        return instruction(c.m, c.n, c.a, c.b, c.d, a_mn=c.a_mn, b_mn=c.b_mn, negate=c.negate)

    def code(self, rest: str = "", word: int | None = None) -> str:
        c = self.case
        left = f"[%taddr+{A_COLUMN + (c.lane << 16)}]" if c.a_in_tmem else "%a"
        scale = ".block_scale" + {0: "", 32: ".block32", 16: ".block16"}[c.vector] if c.vector else ""
        scales = f" [%taddr+{SFA_COLUMN}], [%taddr+{SFB_COLUMN}]," if c.vector else ""
        tail = f", {c.shift}" if c.shift else ""
        return (
            f"mov.b64 %a, {self.a.descriptor()}; mov.b64 %b, {self.b.descriptor()}; "
            f"mov.b32 %y, {self.word() if word is None else word}; setp.eq.u32 %p1, {int(c.keep)}, 1; "
            f"tcgen05.mma.cta_group::{c.group}.kind::{c.kind}{scale} "
            f"[%taddr+{D_COLUMN + (c.lane << 16)}], {left}, %b, %y,{scales}{rest} %p1{tail};"
        )

    def kernel(self, *body: str, **options: object) -> Kernel:
        options.setdefault("columns", self.case.n // (2 if self.split else 1))
        return Kernel(list(body), tmem=self.tmem, smem=self.smem, first=D_COLUMN, **options)  # type: ignore[arg-type]

    @property
    def split(self) -> bool:
        return self.case.group == 2 and self.case.m == 128

    def expected(self) -> Array:
        sign = -1 if self.case.negate in (1, 2) else 1
        product = sign * (self.left @ self.right.T)
        return product + self.before * 2.0**-self.case.shift if self.case.keep else product

    def result(self, image: Array) -> Array:
        lanes, columns = d_places(self.case.m, self.case.n, self.case.group)
        return np.concatenate([image[cta][self.case.lane + lanes, columns] for cta in range(self.case.group)])


F8 = ("e4m3", "e5m2")
PLAIN = [
    *(Case(a_mode=x, b_mode=y) for x, y in itertools.product(("none", "32", "64", "128"), repeat=2)),
    *(Case(a="bf16", b="bf16", a_mode=m, b_mode=m, a_mn=x, b_mn=y)
      for m in ("none", "32", "64", "128") for x, y in ((True, False), (False, True), (True, True))),
    *(Case(slice=s, a_mode=m, b_mode=m) for m, s in (("64", 1), ("128", 1), ("128", 3))),
    *(Case(n=n, keep=False) for n in (8, 24, 256)),
    Case(m=64, lane=0),
    Case(m=64, lane=16, n=40),
    Case(d="f16"),
    Case(a="f16", b="bf16", negate=1),
    Case(negate=2),
    Case(negate=3, shift=3),
    *(Case(a_in_tmem=True, m=m, lane=at, b_mn=True) for m, at in ((128, 0), (64, 0), (64, 16))),
    *(Case("tf32", "tf32", "tf32", a_mode=m, b_mode=m) for m in ("none", "32", "64", "128")),
    Case("tf32", "tf32", "tf32", a_mode="128x32", b_mode="128x32", a_mn=True, b_mn=True),
    Case("tf32", "tf32", "tf32", a_in_tmem=True),
    *(Case("f8f6f4", x, y, b_mn=m, a_mn=m) for x in F8 for y in F8 for m in (False, True)),
    *(Case("f8f6f4", x, y) for x, y in (("e2m1", "e4m3"), ("e3m2", "e2m3"), ("e5m2", "e2m1"))),
    Case("f8f6f4", "e4m3", "e4m3", a_in_tmem=True, d="f16", keep=False),
    *(Case("i8", x, y, "s32", n=32) for x in ("u8", "s8") for y in ("u8", "s8")),
]  # fmt: skip
PAIRS = [
    *(Case(m=m, n=n, group=2, a_mn=t, b_mn=t) for m, n in ((256, 64), (128, 64), (256, 256)) for t in (False, True)),
    *(Case(m=m, group=2, a_in_tmem=True) for m in (128, 256)),
    Case("f8f6f4", "e4m3", "e5m2", m=256, group=2),
]
SCALED = [
    *(Case("mxf8f6f4", a, b, scale="ue8m0", vector=32, ids=i)
      for a, b, i in (("e4m3", "e4m3", (0, 0)), ("e5m2", "e2m1", (1, 3)), ("e2m3", "e3m2", (2, 0)))),
    *(Case("mxf4", "e2m1", "e2m1", scale="ue8m0", vector=32, ids=i) for i in ((0, 0), (2, 0), (0, 2))),
    *(Case("mxf4nvf4", "e2m1", "e2m1", scale=s, vector=v, n=n)
      for s, v, n in (("ue8m0", 32, 64), ("ue4m3", 16, 64), ("ue8m0", 16, 136), ("ue4m3", 16, 24))),
    Case("mxf4", "e2m1", "e2m1", scale="ue8m0", vector=32, a_in_tmem=True),
    *(Case("mxf8f6f4", "e4m3", "e4m3", scale="ue8m0", vector=32, m=m, n=n, group=2)
      for m, n in ((256, 64), (128, 64), (128, 192), (256, 256))),
    Case("mxf4nvf4", "e2m1", "e2m1", scale="ue4m3", vector=16, m=128, n=128, group=2),
]  # fmt: skip


def _identify(case: Case) -> str:
    parts = [case.kind, case.a, case.b, f"m{case.m}n{case.n}", case.a_mode, case.b_mode]
    flags = {"ta": case.a_mn, "tb": case.b_mn, "tmem": case.a_in_tmem, "pair": case.group == 2}
    return "-".join([*parts, *(name for name, given in flags.items() if given)])


@pytest.mark.parametrize("case", [*PLAIN, *PAIRS, *SCALED], ids=_identify)
def test_product(case: Case) -> None:
    setup = Setup(case)
    image, _ = setup.kernel(setup.code()).run()
    found = setup.result(image)
    np.testing.assert_array_equal(found, setup._words(setup.expected()))


@pytest.mark.parametrize("schedule", ["delayed", "adversarial"])
@pytest.mark.parametrize("case", [Case(), Case(group=2, m=256), Case(group=2, m=128)], ids=_identify)
def test_products_are_asynchronous(case: Case, schedule: str) -> None:
    setup = Setup(case)
    image, _ = setup.kernel(setup.code(), setup.code()).run(schedule)
    twice = setup.expected() + setup.left @ setup.right.T
    np.testing.assert_array_equal(setup.result(image), setup._words(twice))


def test_disabled_lanes() -> None:
    setup = Setup(Case())
    image, _ = setup.kernel("mov.b32 %x0, 0xF000000F; mov.b32 %x1, 0;", setup.code(" {%x0,%x1,%x1,%x0},")).run()
    kept = np.isin(np.arange(128) % 32, (0, 1, 2, 3, 28, 29, 30, 31)) & np.isin(np.arange(128) // 32, (0, 3))
    wanted = np.where(kept[:, None], setup.before, setup.expected())
    np.testing.assert_array_equal(setup.result(image), setup._words(wanted))


# --- copies -----------------------------------------------------------------------------------------------------------

COPIES = {
    # rows, bytes of a row, lanes of row r: ValID and SrcLayout of SM100_UTCCP_* in cute/atom/copy_traits_sm100.hpp
    "128x256b": (128, 32, lambda r: (r,)),
    "128x128b": (128, 16, lambda r: (r,)),
    "64x128b.warpx2::02_13": (64, 16, lambda r: (r, 64 + r)),
    "64x128b.warpx2::01_23": (64, 16, lambda r: (r // 32 * 64 + r % 32, r // 32 * 64 + r % 32 + 32)),
    "32x128b.warpx4": (32, 16, lambda r: tuple(range(r, 128, 32))),
}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", COPIES)
def test_copy(shape: str, group: int) -> None:
    rows, nbytes, lanes = COPIES[shape]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 255, (group, rows, 32)).astype(np.uint8)
    smem = np.zeros((group, B_START), np.uint8)
    place = Placed("none", False, 1, rows, 0)
    for cta in range(group):
        place.put(smem[cta], data[cta][..., None])
    code = f"mov.b64 %a, {place.descriptor()}; tcgen05.cp.cta_group::{group}.{shape} [%taddr+{D_COLUMN}], %a;"
    tmem = np.zeros((group, 128, 0), np.uint32)
    image, _ = Kernel([code], tmem=tmem, smem=smem, columns=nbytes // 4, first=D_COLUMN).run()
    for cta in range(group):
        for row in range(rows):
            for lane in lanes(row):
                assert image[cta, lane].tobytes() == data[cta, row, :nbytes].tobytes()


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_operands_need_a_proxy_fence() -> None:
    setup = Setup(Case())
    with pytest.raises(ProxyFault, match="ordinary stores"):
        setup.kernel(setup.code(), fence=False).run()


def test_results_need_a_commit() -> None:
    setup = Setup(Case())
    with pytest.raises(Race, match=r"tcgen05\.ld.*a write by tcgen05\.mma"):
        setup.kernel(setup.code(), commit=False).run()


def test_a_in_tensor_memory_needs_a_wait() -> None:
    setup = Setup(Case(a_in_tmem=True))
    with pytest.raises(Race, match=r"\(A\).*a write by tcgen05\.st"):
        setup.kernel(setup.code(), waits=False).run()


def test_overwritten_operand() -> None:
    setup = Setup(Case())
    late = [f"@%lead st.shared.b32 [{1024}], %y;"]
    with pytest.raises(Race, match=r"a read by tcgen05\.mma"):
        setup.kernel(setup.code(), commit=False, warps=late, columns=0).run()


def test_uninitialised_accumulator() -> None:
    setup = Setup(Case())
    setup.tmem = setup.tmem[:, :, :D_COLUMN]
    with pytest.raises(Uninitialised, match=r"tcgen05\.mma \(D\)"):
        setup.kernel(setup.code()).run()


def test_scales_must_be_in_every_quarter() -> None:
    setup = Setup(Case("mxf4", "e2m1", "e2m1", scale="ue8m0", vector=32))
    setup.tmem[0, 64:96, SFB_COLUMN] ^= 0x0101
    with pytest.raises(MemoryFault, match="differ between the quarters"):
        setup.kernel(setup.code()).run()


def test_pairs_need_both_copies_of_a() -> None:
    setup = Setup(Case(m=128, group=2, a_in_tmem=True))
    setup.tmem[1, 70, A_COLUMN] ^= 1
    with pytest.raises(MemoryFault, match=r"must repeat lanes 0\.\.63"):
        setup.kernel(setup.code()).run()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w | 4, "sparse"),
        (lambda w: w & ~(31 << 24), "M=0"),
        (lambda w: w & ~(63 << 17), "N=0"),
        (lambda w: w | 7 << 7, "the type of A is 7"),
        (lambda w: w | 1 << 6, "bits 6..6 must be 0"),
        (lambda w: w | 8, "only integers saturate"),
    ],
)
def test_refused_instructions(change: object, match: str) -> None:
    setup = Setup(Case())
    with pytest.raises(PtxError, match=match):
        setup.kernel(setup.code(word=change(setup.word()))).run()  # type: ignore[operator]


@pytest.mark.parametrize(("bit", "match"), [(47, "bits 46-48"), (49, "base offset"), (61, "32-byte units")])
def test_refused_descriptors(bit: int, match: str) -> None:
    setup = Setup(Case())
    code = setup.code().replace(str(setup.b.descriptor()), str(setup.b.descriptor() & ~(7 << 61) | 1 << bit))
    with pytest.raises(PtxError, match=match):
        setup.kernel(code).run()


def test_group_sizes_do_not_mix() -> None:
    setup = Setup(Case())
    with pytest.raises(PtxError, match=r"\.cta_group::2 in a kernel that has used \.cta_group::1"):
        setup.kernel(setup.code().replace("cta_group::1", "cta_group::2")).run()
