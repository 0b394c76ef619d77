"""Checks of mbarriers (phases that arrivals straddle, what is left at the end, visibility, uses by other CTAs) and of
setmaxnreg.
"""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.emulator import EmulatorError, Schedule
from cute_attn.emulator import errors as faults
from tests.emulator.micro.case import Text
from tests.emulator.test_checks import ARRIVE, FENCE, INIT, WAIT, kernel, reported, run

pytestmark = pytest.mark.emulator

SCHEDULES = [Schedule(), Schedule("delayed", 3), Schedule("adversarial", 4)]


def _initialised(count: int) -> tuple[str, ...]:
    return tuple(line.replace("64;", f"{count};") if "mbarrier.init" in line else line for line in INIT)


def _lead(*lines: str) -> tuple[str, ...]:
    """Lines for thread 0."""
    return ("setp.ne.u32 %p2, %me, 0;", "@%p2 bra LED;", *lines, "LED:")


# --- phases -----------------------------------------------------------------------------------------------------------

EACH_WARP = ("and.b32 %r10, %me, 31;", "setp.eq.u32 %p4, %r10, 0;", f"@%p4 {ARRIVE}", "bar.sync 0;")
LOAD = (
    *("add.u32 %r11, %r8, 256;", "mov.b64 %rd1, p_map0;", "cvta.param.u64 %rd1, %rd1;", "mov.u32 %r7, 0;"),
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r11], [%rd1, {%r7}], [%r8];",
)
SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r14], %me, [%r13];"
ANNOUNCE = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 64;"

# name -> (part of the message, lines)
UNBALANCED: dict[str, tuple[str, tuple[str, ...]]] = {
    "a count that ends within a warp": (
        "lanes of one warp arrive in phases 0 and 1, its count of 48 is too low [lane 16]",
        (*_initialised(48), ARRIVE),
    ),
    "a count one too low": ("lanes of one warp arrive in phases 0 and 1", (*_initialised(127), ARRIVE)),
    "arrivals of copies": (
        "lanes of one warp arrive in phases 0 and 1, its count of 127 is too low",
        (*_initialised(127), "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];"),
    ),
    "three of four warps a phase": (
        "has 1 of 3 arrivals and 0 bytes are missing in phase 1",
        (*_initialised(3), *EACH_WARP),
    ),
    "bytes that nobody announced": (
        "and -4 bytes are missing in phase 0",
        (*_initialised(1), FENCE, *_lead("add.u32 %r14, %r8, 256;", SEND.replace("%r13", "%r8"))),
    ),
}

BALANCED: dict[str, tuple[str, ...]] = {
    "all arrive": (*_initialised(128), ARRIVE),
    "arrivals of copies": (*_initialised(128), "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];", WAIT),
    "one phase a warp": (*_initialised(32), ARRIVE),
    "lanes of a warp arrive alone": (*_initialised(4), *EACH_WARP, *EACH_WARP),
    "one role arrives ahead at the end": (
        *(*_initialised(128), ARRIVE, WAIT),
        *("setp.lt.u32 %p4, %me, 32;", f"@%p4 {ARRIVE}"),
    ),
    "a role that has no work": (*_initialised(128), "setp.lt.u32 %p4, %me, 32;", f"@%p4 {ARRIVE}"),
    "bytes announced at the tail": (*_initialised(1), *_lead(ANNOUNCE)),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", UNBALANCED)
def test_unbalanced_phases(name: str, schedule: Schedule) -> None:
    message, lines = UNBALANCED[name]
    with pytest.raises(faults.BarrierFault) as raised:
        run(kernel(*lines, threads=128), schedule=schedule)
    assert message in str(raised.value)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", BALANCED)
def test_balanced_phases(name: str, schedule: Schedule) -> None:
    run(kernel(*BALANCED[name], threads=128), schedule=schedule)


# --- visibility -------------------------------------------------------------------------------------------------------

UNFENCED = r"fence\.mbarrier_init or fence\.proxy\.async is missing"
BRING = ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 256;", *LOAD)


@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster;", FENCE, ""])
def test_barriers_of_copies_must_be_visible(fence: str) -> None:
    init = [line + fence if "mbarrier.init" in line else line for line in _initialised(1)]
    with reported(not fence, faults.BarrierFault, UNFENCED):
        run(kernel(*init, *_lead(*BRING), WAIT))


def test_a_fence_is_about_the_barriers_of_its_thread() -> None:
    """fence.mbarrier_init by another warp than the one that has initialised the barrier."""
    late = ("setp.eq.u32 %p3, %me, 32;", "@%p3 fence.mbarrier_init.release.cluster;", "bar.sync 0;")
    with pytest.raises(faults.BarrierFault, match=UNFENCED):
        run(kernel(*_initialised(1), *late, *_lead(*BRING), WAIT))


# --- other CTAs of the cluster ----------------------------------------------------------------------------------------

MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
THERE = ("mov.u32 %r12, %cluster_ctarank;", "mapa.shared::cluster.u32 %r13, %r8, 0;", "add.u32 %r14, %r13, 512;")


def _pair(first: tuple[str, ...], second: tuple[str, ...], end: str, count: int = 1) -> Text:
    """Thread 0 of either CTA executes lines, with the address of a barrier of the first CTA in %r13."""
    init = [line + "fence.mbarrier_init.release.cluster;" if "init" in line else line for line in _initialised(count)]
    lead = ("setp.ne.u32 %p2, %me, 0;", "@%p2 bra LED;", "setp.ne.u32 %p3, %r12, 0;", "@%p3 bra SECOND;")
    return kernel(*init, *THERE, MEET, *lead, *first, "bra LED;", "SECOND:", *second, "LED:", end, cluster=2)


def _wait(how: str = "") -> str:
    return WAIT.replace(".parity", f".parity{how}")


def _arrive(how: str = ".release") -> str:
    return f"mbarrier.arrive{how}.cluster.shared::cluster.b64 _, [%r13];"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("arrival", "wait", "ordered"),
    [
        (_arrive(), _wait(".acquire.cluster"), True),
        (_arrive(".relaxed"), _wait(".acquire.cluster"), False),
        (_arrive(), _wait(".relaxed.cluster"), False),
    ],
    ids=["release", "relaxed arrival", "relaxed wait"],
)
def test_relaxed_arrivals_order_no_memory(arrival: str, wait: str, ordered: bool, schedule: Schedule) -> None:
    """The second CTA stores to the first, which reads."""
    store, load = "st.shared::cluster.b32 [%r14], %me;", "ld.shared.b32 %r2, [%r8+512];"
    with reported(not ordered, faults.Race):
        run(_pair((wait, load), (store, arrival), MEET), grid=2, schedule=schedule)


USES = {
    "an arrival": ((), (_arrive(),)),
    "a relaxed arrival": ((), (_arrive(".relaxed"),)),
    "st.async": ((ANNOUNCE.replace("64;", "4;"),), (SEND,)),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("meets", [False, True], ids=["alone", "cluster barrier"])
@pytest.mark.parametrize("waits", [False, True], ids=["leaves", "waits"])
@pytest.mark.parametrize("use", USES)
def test_a_cta_outlives_what_others_do_at_its_barriers(use: str, waits: bool, meets: bool, schedule: Schedule) -> None:
    """A barrier of the cluster behind an arrival is as good as a wait for it; not behind asynchronous operations."""
    first, second = USES[use]
    text = _pair((*first, WAIT) if waits else first, second, MEET if meets else "")
    ordered, what = waits or (meets and "arrival" in use), use.replace("a relaxed", "an")
    report = rf"CTA \(0, 0, 0\) may end before {what} of CTA|which has ended"
    with reported(not ordered, faults.BarrierFault, report):
        run(text, grid=2, schedule=schedule)


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("arrivals", [1, 2])
def test_a_warp_that_lags(arrivals: int, seed: int) -> None:
    """Warp 1 waits for the first phase, and may come when the second is over, too."""
    lead = ("setp.eq.u32 %p4, %me, 0;", *[f"@%p4 {ARRIVE}"] * arrivals)
    text = kernel(*_initialised(1), *lead, "setp.lt.u32 %p5, %me, 32;", "@%p5 bra ENDED;", WAIT, "ENDED:")
    if arrivals == 1:
        run(text, schedule=Schedule("lagging", seed))
    elif seed == 1:
        with pytest.raises(faults.Deadlock):
            run(text, schedule=Schedule("lagging", seed))


def test_lanes_that_test_different_phases() -> None:
    """Each lane learns of the phase that it asks for: even lanes of one to come, odd lanes of the one before."""
    wanted = ("and.b32 %r10, %me, 1;", "xor.b32 %r10, %r10, 1;")
    test = "mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r8], %r10;"
    found = run(
        kernel(*INIT, ARRIVE, "bar.sync 0;", *wanted, test, "selp.u32 %r11, 1, 0, %p4;", "st.global.b32 [%rd8], %r11;")
    )
    assert np.frombuffer(found, np.uint32)[:64].tolist() == [0, 1] * 32


# --- setmaxnreg -------------------------------------------------------------------------------------------------------


def _registers(at_launch: int | None, first: str, second: str, schedule: Schedule = SCHEDULES[0]) -> None:
    """Two warpgroups, of which each executes one instruction."""
    lines = ("setp.ge.u32 %p1, %me, 128;", "@%p1 bra SECOND;", first, "bra SKIP;", "SECOND:", second, "SKIP:")
    given = {} if at_launch is None else {"registers": at_launch}
    run(kernel(*lines, threads=256), schedule=schedule, **given)


def _set(direction: str, count: int) -> str:
    return f"setmaxnreg.{direction}.sync.aligned.u32 {count};"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_registers_that_are_released_can_be_claimed(schedule: Schedule, order: int) -> None:
    for at_launch, claimed in ((128, 192), (125, 192), (128, 200)):  # allocated in eights
        lacks = r"setmaxnreg\.inc to 200 lacks \d+ registers: \d+ of the CTA's 32768"
        with reported(claimed == 200, faults.Deadlock, lacks):
            _registers(at_launch, *(_set("dec", 64), _set("inc", claimed))[::order], schedule=schedule)


@pytest.mark.parametrize(
    ("at_launch", "first", "kind", "message"),
    [
        (128, _set("dec", 136), faults.RegisterFault, "dec to 136 by a warp that holds 128"),
        (128, _set("inc", 120), faults.RegisterFault, "inc to 120 by a warp that holds 128"),
        (128, _set("dec", 60), faults.PtxError, "a multiple of 8 between 24 and 256"),
        (257, "", faults.LaunchFault, "256 threads of 264 registers: an SM has 65536"),
    ],
)
def test_register_counts(at_launch: int, first: str, kind: type[EmulatorError], message: str) -> None:
    with pytest.raises(kind, match=message):
        _registers(at_launch, first, "")


def test_all_registers_at_launch() -> None:
    """256: all that an SM has for 256 threads."""
    _registers(None, _set("inc", 256), _set("dec", 24))
