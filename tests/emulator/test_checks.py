"""Every check fires on a faulty kernel, names the place, and is silent on the corrected kernel."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from cute_attn.emulator import EmulatorError, GlobalMemory, Schedule
from cute_attn.emulator import errors as faults
from cute_attn.emulator.isa.wgmma import WarpgroupFault
from tests.emulator.micro import emulate
from tests.emulator.micro.case import Case, Map, Text

pytestmark = pytest.mark.emulator
INPUT = np.arange(4096).astype(np.uint8).tobytes()
MAPS = tuple(Map("uint8", (4096,), (), (256,), where=where) for where in ("in", "out"))


def run(text: Text, *, grid: int = 1, ptx: str = "", **how: Any) -> bytes:
    """A kernel of `Text`, or its `ptx`, on 4096 bytes of input and of output; `how`: of `emulate.launched`."""
    shape = {"threads": text.threads, "grid": grid, "cluster": text.cluster, "maps": MAPS[: text.maps]}
    return emulate.run(Case("checks", "kernel", ptx or text.ptx(), INPUT, len(INPUT), **shape), **how)  # type: ignore[arg-type]


def kernel(*lines: str, threads: int = 64, smem: int = 1024, cluster: int = 1) -> Text:
    return Text(threads=threads, smem=smem, maps=len(MAPS), cluster=cluster).add(
        "mov.u32 %r8, sm;", "mad.lo.u32 %r9, %me, 4, %r8;", "mad.wide.u32 %rd8, %me, 4, %dst;", *lines
    )


def reported(when: bool, kind: type[EmulatorError], match: str = "") -> AbstractContextManager[object]:
    """Expect a report, or none."""
    return pytest.raises(kind, match=match or None) if when else nullcontext()


FIRST = ("setp.ne.u32 %p1, %me, 0;", "@%p1 bra SKIP;")
STORE = "st.shared.b32 [%r9], %me;"
OTHERS = ("xor.b32 %r1, %r9, 128;", "ld.shared.b32 %r2, [%r1];", "st.global.b32 [%rd8], %r2;")
INIT = (*FIRST, "mbarrier.init.shared::cta.b64 [%r8], 64;", "SKIP:", "bar.sync 0;")
WAIT = "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%r8], 0; @!p bra WAIT; }"
FILL, READ, UPDATE = (STORE, "bar.sync 0;"), "ld.shared.b32 %r2, [%r8];", "red.shared.add.u32 [%r8], 1;"
BULK = (
    *(*FIRST, "mov.b64 %rd1, p_map1;", "cvta.param.u64 %rd1, %rd1;", "mov.u32 %r7, 0;"),
    "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd1, {%r7}], [%r8];",
    *("cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", "SKIP:"),
)
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r8];"
FENCE = "fence.proxy.async;"
EVEN = ("and.b32 %r1, %me, 1;", "setp.eq.u32 %p1, %r1, 0;")

COPIED = (
    "mad.wide.u32 %rd9, %me, 4, %src;",
    "cp.async.ca.shared.global [%r9], [%rd9], 4;",
    *("cp.async.commit_group;", "cp.async.wait_group 0;"),
)

WRONG: dict[type[EmulatorError], dict[str, tuple[str, tuple[str, ...]]]] = {  # part of the message, lines
    faults.Uninitialised: {"uninitialised shared": ("uninitialised shared", ("ld.shared.b32 %r1, [%r9];",))},
    faults.MemoryFault: {
        "below shared": ("outside", ("ld.shared.b32 %r1, [%r9+-2048];",)),
        "beyond shared": ("outside", ("st.shared.b32 [%r9+1024], %me;",)),
        "misaligned": ("not aligned", ("st.shared.v2.b32 [%r9], {%me, %me};",)),
        "beyond global": ("no range", ("ld.global.b32 %r1, [%rd8+4096];",)),
        "misaligned global": ("not aligned", ("ld.global.b32 %r1, [%src+2];",)),
        "write to an input": ("may only read", ("st.global.b32 [%src], %me;",)),
    },
    faults.Race: {
        "write, then read by another warp": ("races with a write by warp", (STORE, *OTHERS)),
        "read, then write by another warp": ("races with a read by warp", (STORE, "bar.sync 0;", *OTHERS, STORE)),
        "update, then read by another warp": ("races with a write", (*FILL, UPDATE, READ)),
        "update, then write by another warp": ("races with a write", (*FILL, UPDATE, STORE)),
        "update, then async read": ("races with a write", (STORE, FENCE, "bar.sync 0;", UPDATE, FENCE, *BULK)),
        "read, then update by another warp": ("races with a read", (*FILL, READ, UPDATE)),
        "two writers": ("races with a write", ("st.shared.b32 [%r8], %me;",)),
        "async read, then write": ("races", (STORE, FENCE, "bar.sync 0;", *BULK[:-2], "SKIP:", STORE)),
        "copies not waited for": ("cp.async", (*COPIED[:2], "cp.async.commit_group;", "ld.shared.b32 %r1, [%r9];")),
    },
    faults.ProxyFault: {
        "generic write, async read": ("fence.proxy.async", (STORE, "bar.sync 0;", *BULK)),
        "fence, generic write, async read": ("no fence.proxy.async", (FENCE, STORE, "bar.sync 0;", *BULK)),
        "copies, then async read": ("fence.proxy.async", (*COPIED, "bar.sync 0;", *BULK)),
        "update, then async read": ("fence.proxy.async", (STORE, FENCE, "bar.sync 0;", UPDATE, "bar.sync 0;", *BULK)),
    },
    faults.BarrierFault: {
        "no mbarrier": ("no mbarrier", (ARRIVE,)),
        "mbarrier not visible": ("before its initialisation", (*INIT[:-1], ARRIVE)),
        "too many arrivals": ("arrivals where", (*INIT, ARRIVE, ARRIVE[:-1] + ", 40;")),
        "mbarrier overwritten by a store": ("overwrites", (*INIT, ARRIVE, STORE)),
        "barrier with too many warps": ("more than 32 threads", ("bar.sync 3, 32;", "bar.sync 3, 64;")),
    },
    faults.Deadlock: {
        "never arrives": ("parity 0 (64 of 64 arrivals", (*INIT, WAIT)),
        "barrier with too few warps": ("barrier 3 (2 of 4 warps)", ("bar.sync 3, 128;",)),
        "endless": ("does not end", ("LOOP:", "bra LOOP;")),
    },
    faults.Divergence: {
        "lanes missing": ("names lanes", (*EVEN, "@%p1 shfl.sync.idx.b32 %r2, %me, 0, 31, -1;")),
        "a barrier of some lanes": ("bar.sync with lanes of warp 0 missing", (*EVEN, "@%p1 bar.sync 0;")),
    },
    faults.UnknownForm: {
        "unknown form": ("frobnicate.b32", ("frobnicate.b32 %r1, %r2;",)),
        "wrong architecture": ("does not exist on sm_90", ("cvt.rn.f16x2.e2m1x2 %r1, %r2;",)),
    },
}

RIGHT: dict[str, tuple[str, ...]] = {
    "copies, then async read": (*COPIED, FENCE, "bar.sync 0;", *BULK),
    "updates, barrier, read, barrier, write": (*FILL, UPDATE, "bar.sync 0;", READ, "bar.sync 0;", STORE),
    "updates, fence, barrier, async read": (*FILL, UPDATE, FENCE, "bar.sync 0;", *BULK),
    "read, barrier, write": (STORE, "bar.sync 0;", *OTHERS, "bar.sync 0;", STORE),
    "write, fence by the writer, async read": (STORE, FENCE, "bar.sync 0;", *BULK),
    "write, fence by the reader, async read": (STORE, "bar.sync 0;", FENCE, *BULK),
    "async read, wait, write": (STORE, FENCE, "bar.sync 0;", *BULK, "bar.sync 0;", STORE),
    "mbarrier": (*INIT, ARRIVE, WAIT),
    "writes handed over by an mbarrier": (
        *(*INIT, "st.shared.b32 [%r9+512], %me;", ARRIVE, WAIT),
        *("xor.b32 %r1, %r9, 128;", "ld.shared.b32 %r2, [%r1+512];"),
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in WRONG.items() for name in rows])
def test_wrong(kind: type[EmulatorError], name: str) -> None:
    message, lines = WRONG[kind][name]
    with pytest.raises(kind, match=re.escape(message)):
        run(kernel(*lines))


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("delayed", 3), Schedule("adversarial", 4)], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, schedule: Schedule) -> None:
    run(kernel(*RIGHT[name]), schedule=schedule)


def test_errors_say_where() -> None:
    text = kernel(".loc 1 42 7", "ld.shared.b32 %r1, [%r9];")
    ptx = text.ptx().replace(".address_size 64", '.address_size 64\n.file 1 "kernels/some.py"')
    line = next(i for i, x in enumerate(ptx.splitlines(), 1) if "ld.shared" in x)
    with pytest.raises(faults.Uninitialised) as raised:
        run(text, ptx=ptx)
    location = raised.value.location
    assert location is not None
    assert (location.kernel, location.cta, location.line) == ("micro", (0, 0, 0), line)
    assert location.source == "kernels/some.py:42"
    assert "ld.shared.b32" in str(raised.value)
    assert raised.value.lane == 0


def test_output_is_uninitialised_until_written() -> None:
    run(kernel("st.global.b32 [%rd8], %me;", "ld.global.b32 %r1, [%rd8];"), valid=False)
    with pytest.raises(faults.Uninitialised, match="never written"):
        run(kernel("ld.global.b32 %r1, [%rd8];"), valid=False)


# --- grids ------------------------------------------------------------------------------------------------------------

SUM_OF_BLOCKS = (
    # Every CTA adds its number, the last one to come reads what all have written.
    "mov.u32 %r1, %ctaid.x;",
    "mad.wide.u32 %rd1, %r1, 4, %dst;",
    *FIRST,
    "add.u32 %r2, %r1, 10;",
    "st.global.b32 [%rd1+64], %r2;",
    "atom{order}.global.add.u32 %r3, [%dst], 1;",
    *("setp.ne.u32 %p2, %r3, 3;", "@%p2 bra SKIP;"),
    *("ld.global.b32 %r4, [%dst+64];", "ld.global.b32 %r5, [%dst+76];"),
    "add.u32 %r4, %r4, %r5;",
    "st.global.b32 [%dst+128], %r4;",
    "SKIP:",
)


@pytest.mark.parametrize(
    ("order", "ok"),
    [(".acq_rel.gpu", True), ("", False), (".relaxed.gpu", False), (".release.gpu", False), (".acquire.gpu", False)],
)
@pytest.mark.parametrize("schedule", ["eager", "adversarial"])
def test_semaphores(order: str, ok: bool, schedule: str) -> None:
    lines = [line.replace("{order}", order) for line in SUM_OF_BLOCKS]
    with reported(not ok, faults.Race, "cluster"):
        found = run(kernel(*lines), grid=4, schedule=Schedule(schedule, 5))
        assert int.from_bytes(found[128:132], "little") == 10 + 13


def test_waiting_for_a_later_cta() -> None:
    """A CTA that an earlier one waits for starts although the earlier one has not ended."""
    lines = (
        "mov.u32 %r1, %ctaid.x;",
        "setp.ne.u32 %p2, %r1, 0;",
        "@%p2 bra SECOND;",
        "SPIN:",
        "atom.acquire.gpu.global.or.b32 %r2, [%dst], 0;",
        "setp.eq.u32 %p3, %r2, 0;",
        "@%p3 bra SPIN;",
        "st.global.b32 [%dst+8], %r2;",
        "bra SKIP;",
        "SECOND:",
        "setp.ne.u32 %p4, %me, 0;",
        "@%p4 bra SKIP;",
        "mov.u32 %r3, 7;",
        "red.release.gpu.global.or.b32 [%dst], %r3;",
        "SKIP:",
    )
    assert run(kernel(*lines, threads=32), grid=2)[8] == 7


@pytest.mark.parametrize("access", ["ld.global.b32 %r1, [%src];", "st.global.b32 [%rd8], %me;"])
def test_dependent_launches(access: str) -> None:
    run(kernel(access), pdl=False)
    run(kernel("griddepcontrol.wait;", access), pdl=True)
    with pytest.raises(faults.Race, match="earlier launch"):
        run(kernel(access, "griddepcontrol.wait;"), pdl=True)
    with pytest.raises(faults.Race, match="earlier launch"):  # only warp 1 waits
        run(kernel("setp.lt.u32 %p1, %me, 32;", "@%p1 bra SKIP;", "griddepcontrol.wait;", "SKIP:", access), pdl=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (48, 1, 1)}, "multiple of 32"),
        ({"block": (128, 1, 1)}, "requires"),
        ({"smem_bytes": 232448}, "bytes of shared memory"),
        ({"smem_bytes": None}, "description lacks smem_bytes"),
        ({"params": bytes(8)}, "too few"),
        ({"symbol": "macro"}, "no kernel macro"),
        ({"grid": 3, "cluster": (2, 1, 1)}, "multiple of the cluster"),
    ],
)
def test_launches_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(faults.LaunchFault, match=message):
        run(kernel(), **change)
    with pytest.raises(faults.MemoryFault, match=r"data of x must be .* nbytes = 8, got float32"):
        GlobalMemory().add("x", 0, 8, data=np.zeros(2, np.float32))


# --- wgmma ------------------------------------------------------------------------------------------------------------

ZEROS = tuple(f"mov.b32 %r{i}, 0;" for i in range(20, 24))
PRODUCT = (
    "{ .reg .b64 da; .reg .b32 lo; .reg .pred p; setp.eq.u32 p, 0, 0; shr.u32 lo, %r8, 4; and.b32 lo, lo, 0x3fff;"
    " cvt.u64.u32 da, lo; or.b64 da, da, 0x0000000800080000;"
    " wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r20, %r21, %r22, %r23}, da, da, p, 1, 1, 0, 0; }"
)
WIDER = PRODUCT.replace("n8k16", "n16k16").replace("%r23}", "%r23, %r24, %r25, %r26, %r27}")
W_FENCE, W_COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
W_WAIT = "wgmma.wait_group.sync.aligned 0;"
USE = "st.global.b32 [%rd8], %r20;"


def product(*lines: str) -> Text:
    text = Text(threads=128, smem=4096).fill_shared(4096)
    return text.add("mov.u32 %r8, sm;", "mad.wide.u32 %rd8, %me, 4, %dst;", *lines)


def test_products() -> None:
    """In one group and in two, and in flight when warps diverge."""
    diverge = ("setp.ge.u32 %p1, %me, 32;", "@%p1 bra OTHERS;", "bar.sync 1, 32;", "OTHERS:")
    together = run(product(*ZEROS, W_FENCE, PRODUCT, W_COMMIT, W_WAIT, USE))
    run(product(*ZEROS, W_FENCE, PRODUCT, PRODUCT, W_COMMIT, PRODUCT, W_COMMIT, W_WAIT, USE))
    assert run(product(*ZEROS, W_FENCE, PRODUCT, W_COMMIT, *diverge, W_WAIT, USE)) == together


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((*ZEROS, W_FENCE, PRODUCT, W_COMMIT, USE), "before wgmma.wait_group"),
        ((*ZEROS, W_FENCE, PRODUCT, W_COMMIT, "wgmma.wait_group.sync.aligned 1;", USE), "before wgmma.wait_group"),
        ((*ZEROS, W_FENCE, PRODUCT, W_WAIT, USE), "before wgmma.wait_group"),  # not committed
        ((*ZEROS, PRODUCT, W_COMMIT, W_WAIT, USE), "without a wgmma.fence"),
        ((W_FENCE, "add.f32 %r20, %r21, %r22;", PRODUCT, W_COMMIT, W_WAIT, USE), "changed after"),
        ((*ZEROS, W_FENCE, "add.f32 %r24, %r21, %r22;", PRODUCT, WIDER, W_COMMIT, W_WAIT, USE), "changed after"),
    ],
)
def test_registers_of_products(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(faults.RegisterFault, match=message):
        run(product(*lines))


@pytest.mark.parametrize("schedule", [Schedule(), Schedule("adversarial", 1)], ids=lambda schedule: schedule.kind)
@pytest.mark.parametrize(
    ("other", "message"),
    [("", "have not issued all products of warpgroup 0"), (PRODUCT, "issues another product than")],
    ids=["fewer", "others"],
)
def test_warps_of_a_warpgroup_issue_the_same_products(other: str, message: str, schedule: Schedule) -> None:
    start = ("setp.ge.u32 %p1, %me, 32;", "@%p1 bra OTHERS;", PRODUCT, "bra BOTH;", "OTHERS:", other, "BOTH:")
    run(product(*ZEROS, W_FENCE, PRODUCT, W_COMMIT, W_WAIT, USE), schedule=schedule)
    with pytest.raises(WarpgroupFault, match=message):
        run(product(*ZEROS, W_FENCE, *start, W_COMMIT, W_WAIT, USE), schedule=schedule)


def test_operands_need_a_proxy_fence() -> None:
    store = "st.shared.b32 [%r8], %me;"
    with pytest.raises((faults.ProxyFault, faults.Race)):
        run(product("setp.eq.u32 %p1, %me, 0;", f"@%p1 {store}", *ZEROS, W_FENCE, PRODUCT, W_COMMIT, W_WAIT, USE))
