"""The registry of instruction forms, and forms that no golden covers: micro-kernels against the bytes that the PTX ISA
asks for, under all schedules, and what is refused.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cute_attn.emulator import Schedule
from cute_attn.emulator.errors import EmulatorError, MemoryFault, Race, UnknownForm
from cute_attn.emulator.isa import bits, load, registry
from tests.emulator.micro import blackwell, emulate
from tests.emulator.micro.blackwell import memory_cases
from tests.emulator.micro.case import Case, Text, elementwise, rng, values
from tests.emulator.test_checks import kernel, run

pytestmark = pytest.mark.emulator


def test_every_opcode_has_one_form() -> None:
    load()
    assert len({id(entry) for entry, _ in registry.FORMS.values()}) > 100
    assert registry.lookup("mul.wide.s16", 80) == registry.FORMS["mul.wide.s16"]
    with pytest.raises(ValueError, match=r"mul\.wide\.s16 has two forms"):
        registry.form("mul.wide{.s16}")(lambda *_: None)


@pytest.mark.parametrize("kind", ["u16", "s16"])
def test_high_half_of_16_bit_products(kind: str) -> None:
    a, b = (values(kind, 512, rng(f"{kind}{i}")) for i in range(2))
    case = elementwise("integer", f"mul.hi.{kind}", [f"mul.hi.{kind} %d, %a0, %a1;"], (kind, kind), kind, data=[a, b])
    signed = "i2" if kind == "s16" else "u2"
    high = [int(x) * int(y) >> 16 for x, y in zip(a.view(signed), b.view(signed), strict=True)]
    assert np.frombuffer(emulate.run(case), np.uint16).tolist() == [x % (1 << 16) for x in high]


def test_bytes_by_a_constant_selector() -> None:
    """prmt by one selector for all lanes, which the emulator indexes at once, is prmt by a selector per lane, of which
    there is a golden.
    """
    a, b = (values("b32", 64, rng(f"prmt{i}")).view(np.uint32) for i in range(2))
    for selector in (0x0000, 0x3210, 0x7654, 0x5140, 0x6273, 0x89AB, 0x32F0, 0xFFFF):
        one, each = np.array([selector], np.uint32), np.full(64, selector, np.uint32)
        np.testing.assert_array_equal(bits._prmt(a, b, one), bits._prmt(a, b, each))


def test_both_results_of_a_comparison_are_combined_with_what_was_there() -> None:
    """Though the first one takes its place. A prefetch behind such a predicate does nothing."""
    lines = "setp.lt.u32 %p1, %me, 40;", "setp.lt.and.u32 %p1|%p2, %me, 16, %p1;", "selp.b32 %r2, 1, 0, %p2;"
    lines = (*lines, "@%p2 prefetch.global.L2 [%src];", "st.global.b32 [%rd8], %r2;")
    found = np.frombuffer(run(kernel(*lines)), np.uint32)[:64]
    assert found.tolist() == [int(16 <= me < 40) for me in range(64)]


# --- memory forms of Blackwell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*memory_cases()], ids=lambda case: case.id)
def test_the_result_is_that_of_the_isa(case: Case) -> None:
    for seed, kind in enumerate(("eager", "delayed", "adversarial")):
        assert emulate.run(case, schedule=Schedule(kind, seed))[: len(case.want)] == case.want, kind


WIDE = blackwell.wide("st.global.v8.b32")
BY_TWO_WARPS = (
    WIDE.ptx.replace(".reqntid 32", ".reqntid 64")
    .replace("mad.wide.u32 %rd", "and.b32 %r9, %me, 31;\nmad.wide.u32 %rd")
    .replace("%me, 32,", "%r9, 32,")
)


@pytest.mark.parametrize(
    ("case", "kind", "match"),
    [
        (dataclasses.replace(WIDE, ptx=BY_TWO_WARPS, threads=64), Race, "two warps write one address"),
        (blackwell.wide("st.global.v8.b32", offset=16), MemoryFault, "not aligned to 32 bytes"),
        (dataclasses.replace(WIDE, ptx=WIDE.ptx.replace("100a", "90a")), UnknownForm, "does not exist on sm_90"),
    ],
)
def test_wide_stores_that_are_refused(case: Case, kind: type[EmulatorError], match: str) -> None:
    with pytest.raises(kind, match=match):
        emulate.run(case)


# --- clusterlaunchcontrol: clusters take over the work of others that have not started -------------------------------


def _taking_over(cells: int, ctas: int) -> Text:
    """Every warp adds 1 to the cell of its own CTA, then to those of the CTAs whose launch it cancels, which it counts
    in the last cell. Of a pair, both CTAs get the answer to the question of the first.
    """
    return blackwell.text(threads=32, smem=32, cluster=ctas).add(
        ".reg .b128 %answer;",
        "mov.u32 %r0, sm; add.u32 %r1, %r0, 16; setp.eq.u32 %p0, %me, 0;",
        "@%p0 mbarrier.init.shared.b64 [%r1], 1;",
        "fence.mbarrier_init.release.cluster;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %cluster_ctarank;",
        "setp.eq.u32 %p1, %r6, 0; and.pred %p1, %p1, %p0; mov.u32 %r8, 0;",
        "WORK:",
        "mad.lo.u32 %r9, %r4, %r5, %r3; mad.wide.u32 %rd1, %r9, 4, %dst;",
        "@%p0 red.global.add.u32 [%rd1], 1;",
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        ".multicast::cluster::all.b128 [%r0], [%r1];",
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r8; @!%p2 bra WAIT;",
        "xor.b32 %r8, %r8, 1;",
        "ld.shared.v2.b64 {%rd2, %rd3}, [%r0]; mov.b128 %answer, {%rd2, %rd3};",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %answer;",
        "@!%p3 bra END;",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r3, %answer;",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r4, %answer;",
        "add.u32 %r3, %r3, %r6;",
        f"@%p0 red.global.add.u32 [%dst+{4 * cells}], 1;",
        "bra WORK;",
        "END:",
    )


@pytest.mark.parametrize("kind", ["eager", "delayed", "adversarial"])
@pytest.mark.parametrize(("grid", "ctas"), [((5, 2, 1), 1), ((6, 3, 1), 2), ((1, 1, 1), 1)])
def test_every_tile_is_done_once(grid: tuple[int, int, int], ctas: int, kind: str) -> None:
    cells = math.prod(grid)
    case = Case("launch", "control", _taking_over(cells, ctas).ptx(), bytes(16), 4 * cells + 4, cluster=ctas)
    out = np.frombuffer(emulate.run(case, schedule=Schedule(kind, 1), grid=grid), np.uint32)
    np.testing.assert_array_equal(out[:-1], 1)
    if kind == "eager":
        assert (out[-1] > 0) == (cells > ctas)  # some were taken over
