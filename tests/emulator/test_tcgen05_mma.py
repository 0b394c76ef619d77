"""tcgen05.mma and commit: small integers through every layout, against a product of matrices in numpy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import EmulatorError, ProxyFault, PtxError, Race, Uninitialised
from tests.emulator.tcgen05_kernel import Kernel
from tests.emulator.umma_oracle import Placed, instruction, lanes_of

pytestmark = pytest.mark.emulator

A_COLUMN, D_COLUMN = 0, 64  # of tensor memory
B_START = 64 << 10  # in the shared image


DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Values that every type has, small enough that sums are exact."""
    return rng.integers(0, 8, shape) * rng.choice([-1.0, 1.0], shape)


def row_bytes(x: Array, type_: str) -> Array:
    """Items of each row as they lie in 32 bytes: [rows, 32]."""
    return torch.from_numpy(x).to(DTYPES[type_]).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Case:
    kind: str = "f16"
    a: str = "f16"
    b: str = "f16"
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

    @property
    def k(self) -> int:
        return 32 // self.unit

    @property
    def unit(self) -> int:
        return DTYPES[self.a].itemsize


class Setup:
    """Matrices of a case, in the images of a kernel."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(7)
        self.left, self.right = numbers(rng, (case.m, case.k)), numbers(rng, (case.n, case.k))
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

    def _shared(self, cta: int, place: Placed, x: Array, type_: str) -> None:
        place.put(self.smem[cta], row_bytes(x, type_).reshape(len(x), -1, place.unit))

    def _put_a(self, cta: int, x: Array) -> None:
        if not self.case.a_in_tmem:
            self._shared(cta, self.a, x, self.case.a)
            return
        raw = np.ascontiguousarray(row_bytes(x, self.case.a)).view(np.uint32)
        self.tmem[cta][self.lanes, A_COLUMN : A_COLUMN + 8] = raw

    def _put_d(self, cta: int, x: Array) -> None:
        self.tmem[cta][self.lanes, D_COLUMN:] = self._words(x)

    @property
    def lanes(self) -> Array:
        return self.case.lane + lanes_of(self.case.m, self.case.group)

    def _words(self, x: Array) -> Array:
        return x.astype(np.float32).view(np.uint32)

    def word(self) -> int:
        c = self.case
        return instruction(c.m, c.n, c.a, c.b, a_mn=c.a_mn, b_mn=c.b_mn)

    def code(self, word: int | None = None, extra: str = "") -> str:
        c = self.case
        left = f"[%taddr+{A_COLUMN + (c.lane << 16)}]" if c.a_in_tmem else "%a"
        return (
            f"mov.b64 %a, {self.a.descriptor()}; mov.b64 %b, {self.b.descriptor()}; "
            f"mov.b32 %y, {self.word() if word is None else word}; setp.eq.u32 %p1, {int(c.keep)}, 1; "
            f"tcgen05.mma.cta_group::{c.group}.kind::{c.kind} "
            f"[%taddr+{D_COLUMN + (c.lane << 16)}], {left}, %b, %y, %p1{extra};"
        )

    def kernel(self, *body: str, **options: object) -> Kernel:
        options.setdefault("columns", self.case.n)
        return Kernel(list(body), tmem=self.tmem, smem=self.smem, first=D_COLUMN, **options)  # type: ignore[arg-type]

    def expected(self) -> Array:
        product = self.left @ self.right.T
        return product + self.before if self.case.keep else product

    def result(self, image: Array) -> Array:
        return np.concatenate([image[cta][self.lanes, : self.case.n] for cta in range(self.case.group)])


F8 = ("e4m3", "e5m2")
PLAIN = [
    *(Case(a_mode=x, b_mode=y) for x, y in itertools.product(("none", "32", "64", "128"), repeat=2)),
    *(Case(a="bf16", b="bf16", a_mode=m, b_mode=m, a_mn=x, b_mn=y)
      for m in ("none", "32", "64", "128") for x, y in ((True, False), (False, True), (True, True))),
    *(Case(slice=s, a_mode=m, b_mode=m) for m, s in (("64", 1), ("128", 1), ("128", 3))),
    *(Case(n=n, keep=False) for n in (8, 24, 256)),
    Case(m=64, lane=0),
    Case(m=64, lane=16, n=40),
    Case(n=48, a_in_tmem=True),
    Case(a="f16", b="bf16"),
    *(Case(a_in_tmem=True, m=m, lane=at, b_mn=True) for m, at in ((128, 0), (64, 0), (64, 16))),
    *(Case("f8f6f4", x, y, b_mn=m, a_mn=m) for x in F8 for y in F8 for m in (False, True)),
    Case("f8f6f4", "e4m3", "e4m3", a_in_tmem=True, keep=False),
]  # fmt: skip
PAIRS = [
    *(Case(m=256, n=n, group=2, a_in_tmem=n == 96) for n in (96, 48)),
    *(Case(m=m, n=n, group=2, a_mn=t, b_mn=t) for m, n in ((256, 64), (256, 256)) for t in (False, True)),
    Case(m=256, group=2, a_in_tmem=True),
    Case("f8f6f4", "e4m3", "e5m2", m=256, group=2),
]


def _identify(case: Case) -> str:
    parts = [case.kind, case.a, case.b, f"m{case.m}n{case.n}", case.a_mode, case.b_mode]
    flags = {"ta": case.a_mn, "tb": case.b_mn, "tmem": case.a_in_tmem, "pair": case.group == 2}
    return "-".join([*parts, *(name for name, given in flags.items() if given)])


@pytest.mark.parametrize("case", [*PLAIN, *PAIRS], ids=_identify)
def test_product(case: Case) -> None:
    setup = Setup(case)
    image, _ = setup.kernel(setup.code()).run()
    found = setup.result(image)
    np.testing.assert_array_equal(found, setup._words(setup.expected()))


@pytest.mark.parametrize("schedule", ["delayed", "adversarial"])
@pytest.mark.parametrize("case", [Case(), Case(group=2, m=256)], ids=_identify)
def test_products_are_asynchronous(case: Case, schedule: str) -> None:
    setup = Setup(case)
    image, _ = setup.kernel(setup.code(), setup.code()).run(schedule)
    twice = setup.expected() + setup.left @ setup.right.T
    np.testing.assert_array_equal(setup.result(image), setup._words(twice))


# --- what is wrong ----------------------------------------------------------------------------------------------------


# name -> (case, options of the kernel, what must be raised, the message)
WRONG: dict[str, tuple[Case, dict[str, object], type[EmulatorError], str]] = {
    "operands need a proxy fence": (Case(), {"fence": False}, ProxyFault, "ordinary stores"),
    "results need a commit": (Case(), {"commit": False}, Race, r"tcgen05\.ld.*a write by tcgen05\.mma"),
    "A needs a wait": (Case(a_in_tmem=True), {"waits": False}, Race, r"\(A\).*a write by tcgen05\.st"),
    "an operand is overwritten": (
        Case(),
        {"commit": False, "warps": ["@%lead st.shared.b32 [1024], %y;"], "columns": 0},
        Race,
        r"a read by tcgen05\.mma",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    case, options, kind, match = WRONG[name]
    setup = Setup(case)
    with pytest.raises(kind, match=match):
        setup.kernel(setup.code(), **options).run()


def test_uninitialised_accumulator() -> None:
    setup = Setup(Case())
    setup.tmem = setup.tmem[:, :, :D_COLUMN]
    with pytest.raises(Uninitialised, match=r"tcgen05\.mma \(D\)"):
        setup.kernel(setup.code()).run()


REFUSED: list[tuple[Case, Callable[[Setup], str], str]] = [
    *(
        (Case(), functools.partial(Setup.code, extra=extra), "disabled lanes and scale-input-d are not supported")
        for extra in (", 3", ", {%x0,%x1,%x1,%x0}")
    ),
    # bits of the instruction descriptor that are set, and bits that are cleared before
    *(
        (Case(), lambda setup, bits=bits, cleared=cleared: setup.code(setup.word() & ~cleared | bits), match)
        for bits, cleared, match in (
            (4, 0, "sparse matrices"),
            (0, 1 << 4, "D of another type"),
            (1 << 14, 0, "negated operands"),
            (0, 31 << 24, "M=0"),
            (0, 63 << 17, "N=0"),
            (7 << 7, 0, "the type of A is 7"),
            (1 << 6, 0, "bits 6..6 stand for"),
            (8, 0, "saturation"),
        )
    ),
    # bits of the matrix descriptor of B
    *(
        (Case(), lambda setup, bit=bit: replaced(setup, setup.b.descriptor() & ~(7 << 61) | 1 << bit), match)
        for bit, match in ((47, "bits 46-48"), (49, "base offset"), (61, "swizzle mode 1 is not"))
    ),
    (
        Case(),
        lambda setup: setup.code().replace("cta_group::1", "cta_group::2"),
        r"\.cta_group::2 in a kernel that has used \.cta_group::1",
    ),
    *((Case(group=2, m=256, n=n, a_in_tmem=True), Setup.code, "a multiple of 32 is accepted") for n in (48, 80, 240)),
    (
        Case(a_in_tmem=True),
        lambda setup: setup.code().replace(f"[%taddr+{D_COLUMN}]", f"[%taddr+{D_COLUMN + 1}]"),
        "D at column 65",
    ),
    (Case(a_in_tmem=True), lambda setup: setup.code().replace("[%taddr+0]", "[%taddr+2]"), "A at column 2"),
]


def replaced(setup: Setup, descriptor: int) -> str:
    """The code with another descriptor of B."""
    return setup.code().replace(str(setup.b.descriptor()), str(descriptor))


@pytest.mark.parametrize(("case", "code", "match"), REFUSED, ids=[match for _, _, match in REFUSED])
def test_refused(case: Case, code: Callable[[Setup], str], match: str) -> None:
    setup = Setup(case)
    with pytest.raises(PtxError, match=match):
        setup.kernel(code(setup)).run()
