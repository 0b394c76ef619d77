"""tcgen05.mma.ws, tcgen05.cp that unpacks 4- and 6-bit items, and addresses that products refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import PtxError
from tests.emulator.tcgen05_kernel import Kernel
from tests.emulator.test_tcgen05_mma import COPIES, D_COLUMN, Case, Setup
from tests.emulator.umma_oracle import Placed, layout

pytestmark = pytest.mark.emulator


def ws_places(m: int, n: int) -> tuple[Array, Array]:
    """(lane, column) of D[row, column]: the atoms of `tmem_frg_ws` in CUTLASS (cute/atom/mma_traits_sm100_frag.hpp)."""
    parts = 128 // m
    found = layout((m,), (1,))[:, None] + layout((n // parts, parts), (128, m))[None]
    return found % 128, found // 128


class Stationary(Setup):
    """The product of a case with stationary weights."""

    use = ""  # of a collector buffer
    mask = ""

    def _put_d(self, cta: int, x: Array) -> None:
        lanes, columns = ws_places(self.case.m, self.case.n)
        self.tmem[cta][lanes, D_COLUMN + columns] = self._words(x)

    def code(self, rest: str = "", word: int | None = None) -> str:
        head, _, tail = super().code(rest, word).partition("tcgen05.mma")
        kind = f".cta_group::1.kind::{self.case.kind}"
        return f"{head}tcgen05.mma.ws{tail.replace(kind, kind + self.use).replace('%p1;', f'%p1{self.mask};')}"

    def kernel(self, *body: str, **options: object) -> Kernel:
        return super().kernel(*body, columns=self.case.n * self.case.m // 128, **options)

    def result(self, image: Array) -> Array:
        lanes, columns = ws_places(self.case.m, self.case.n)
        found: Array = image[0][lanes, columns]
        return found


CASES = [
    *(Case(m=m, n=n) for m, n in itertools.product((32, 64, 128), (64, 128, 256))),
    *(Case(kind="f8f6f4", a="e4m3", b="e5m2", m=m, n=128, keep=False) for m in (32, 64)),
    *(Case(kind="tf32", a="tf32", b="tf32", m=m, n=64) for m in (32, 128)),
    *(Case(kind="i8", a="s8", b="u8", d="s32", m=m, n=64) for m in (32, 64)),
    Case(a="bf16", b="bf16", m=64, n=64, b_mn=True),
    Case(m=128, n=64, a_in_tmem=True),
]


def _check(setup: Setup) -> None:
    for schedule in ("eager", "adversarial"):
        image, _ = setup.kernel(setup.code()).run(schedule)
        words = setup.result(image)
        found = words.view(np.int32 if setup.case.d == "s32" else np.float32)
        np.testing.assert_array_equal(found, setup.expected())


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.a}-{c.m}x{c.n}{'-ts' * c.a_in_tmem}")
def test_stationary_weights(case: Case) -> None:
    _check(Stationary(case))


@pytest.mark.parametrize("use", [".collector::b0::fill", ".collector::b3::lastuse"])
def test_collector_buffers(use: str) -> None:
    setup = Stationary(Case(m=32, n=64))
    setup.use, setup.mask = use, ", %a"
    code = setup.code().replace("tcgen05.mma.ws", "mov.b64 %c, 0; tcgen05.mma.ws").replace("%p1, %a;", "%p1, %c;")
    kernel = setup.kernel(code.replace("mov.b64 %c, 0;", ".reg .b64 %c; mov.b64 %c, 0;"))
    np.testing.assert_array_equal(setup.result(kernel.run()[0]).view(np.float32), setup.expected())


def test_zero_column_masks_are_refused() -> None:
    setup = Stationary(Case(m=32, n=64))
    setup.mask = ", %c"
    code = setup.code().replace("tcgen05.mma.ws", f".reg .b64 %c; mov.b64 %c, {1 << 39}; tcgen05.mma.ws")
    with pytest.raises(PtxError, match="zero-column mask"):
        setup.kernel(code).run()


@pytest.mark.parametrize(("m", "n"), [(32, 32), (128, 192), (64, 8)])
def test_stationary_shapes(m: int, n: int) -> None:
    with pytest.raises(PtxError, match=r"a \.ws product takes 64, 128 and 256"):
        _check(Stationary(Case(m=m, n=n)))


# --- copies that unpack -----------------------------------------------------------------------------------------------

FORMATS = {".b8x16.b4x16_p64": (4, 2), ".b8x16.b6x16_p32": (6, 0)}  # bits of an item, bit of a byte that it starts at


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", ["128x256b", "64x128b.warpx2::01_23", "32x128b.warpx4"])
@pytest.mark.parametrize("formats", FORMATS)
def test_copy_unpacks(formats: str, shape: str, group: int) -> None:
    rows, nbytes, lanes = COPIES[shape]
    width, low = FORMATS[formats]
    data = np.random.default_rng(3).integers(0, 256, (group, rows, 32)).astype(np.uint8)
    smem = np.zeros((group, 8192), np.uint8)
    place = Placed("none", False, 1, rows, 0)
    for cta in range(group):
        place.put(smem[cta], data[cta][..., None])
    opcode = f"tcgen05.cp.cta_group::{group}.{shape}{formats}"
    code = f"mov.b64 %a, {place.descriptor()}; {opcode} [%taddr+{D_COLUMN}], %a;"
    image, _ = Kernel(
        [code], tmem=np.zeros((group, 128, 0), np.uint32), smem=smem, columns=nbytes // 4, first=D_COLUMN
    ).run()
    for cta, row in itertools.product(range(group), range(rows)):
        want = bytearray()
        for unit in range(nbytes // 16):
            packed = int.from_bytes(data[cta, row, 16 * unit : 16 * unit + 16].tobytes(), "little")
            want += bytes((packed >> width * i & ((1 << width) - 1)) << low for i in range(16))
        for lane in lanes(row):
            assert image[cta, lane].tobytes() == bytes(want)


@pytest.mark.parametrize(("a", "formats"), [("e2m1", 0), ("e2m3", 1), ("e3m2", 1)])
def test_unpacked_copies_are_operands(a: str, formats: int) -> None:
    """A goes from padded shared memory through the copy to tensor memory and into the product."""
    setup = Setup(Case(kind="f8f6f4", a=a, b="e4m3", a_mode="none"))
    copy = f"tcgen05.cp.cta_group::1.128x256b{list(FORMATS)[formats]} [%taddr], %a;"
    product = setup.code().replace(" %a, %b, %y", " [%taddr], %b, %y")
    image, _ = setup.kernel(f"mov.b64 %a, {setup.a.descriptor()}; {copy}", product).run()
    np.testing.assert_array_equal(setup.result(image).view(np.float32), setup.expected())


# --- addresses --------------------------------------------------------------------------------------------------------


def _refused(setup: Setup, code: str, match: str) -> None:
    with pytest.raises(PtxError, match=match):
        setup.kernel(code).run()


def test_a_of_a_pair_in_tensor_memory_wants_n_in_steps_of_32() -> None:
    for n in (48, 80, 240):
        setup = Setup(Case(group=2, m=256, n=n, a_in_tmem=True))
        _refused(setup, setup.code(), "a multiple of 32 is accepted")
    _check(Setup(Case(group=2, m=256, n=96, a_in_tmem=True)))
    _check(Setup(Case(group=2, m=256, n=48)))
    _check(Setup(Case(n=48, a_in_tmem=True)))


def test_columns_of_operands() -> None:
    setup = Setup(Case(a_in_tmem=True))
    _refused(setup, setup.code().replace(f"[%taddr+{D_COLUMN}]", f"[%taddr+{D_COLUMN + 1}]"), "D at column 65")
    _refused(setup, setup.code().replace("[%taddr+0]", "[%taddr+2]"), "A at column 2")
    place = Placed("none", False, 1, 128, 0)
    copy = f"mov.b64 %a, {place.descriptor()}; tcgen05.cp.cta_group::1.128x128b [%taddr+2], %a;"
    _refused(setup, copy, "column 2")
