"""What orders tensor memory: fences, waits and commits. Each is needed, and enough."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cute_attn.emulator.clocks import Clocks, Conflict
from cute_attn.emulator.dtypes import Array
from cute_attn.emulator.errors import BarrierFault, EmulatorError, Race, RegisterFault
from cute_attn.emulator.tensor_memory import TensorMemory, places
from tests.emulator.tcgen05_kernel import AFTER, BEFORE, Kernel
from tests.emulator.test_checks import reported
from tests.emulator.test_tcgen05_mma import Case, Setup
from tests.emulator.umma_oracle import instruction
from tests.support.schedules import KINDS, in_turn

pytestmark = pytest.mark.emulator

GROUPS = {1: Case(a_in_tmem=True, n=32), 2: Case(a_in_tmem=True, m=256, n=32, group=2)}
ORDERING = r"tcgen05\.(?:fence|wait)::[^;]*;|tcgen05\.commit[^;]*;"

# What brings the kernel's data from step to step: filled by all warps, product of one thread, read by all, deallocated.
# (instruction, what is reported without it), in the order of the text.
STEPS: list[tuple[str, type[EmulatorError], str]] = [
    ("wait::st", Race, r"a write by tcgen05\.st"),
    ("fence::before", Race, r"tcgen05\.mma .* a write by tcgen05\.st"),
    ("fence::after", Race, r"tcgen05\.mma .* a write by tcgen05\.st"),
    ("commit", EmulatorError, "nothing can move"),
    ("fence::after", Race, r"tcgen05\.ld.* a write by tcgen05\.mma"),
    *[("wait::ld", RegisterFault, r"before tcgen05\.wait::ld")] * 8,
    ("fence::before", Race, r"tcgen05\.dealloc .* a read by tcgen05\.ld"),
]


def _without(site: int) -> object:
    def rewrite(text: str) -> str:
        match = list(re.finditer(ORDERING, text))[site]
        return text[: match.start()] + text[match.end() :]

    return rewrite


def _kernel(case: Case) -> Kernel:
    setup = Setup(case)
    return setup.kernel(setup.code())


@pytest.mark.parametrize("group", GROUPS)
def test_the_list_of_steps(group: int) -> None:
    found = re.findall(ORDERING, _kernel(GROUPS[group]).text())
    assert [name for name, _, _ in STEPS] == [
        re.match(r"tcgen05\.((?:fence|wait)::[a-z]+?|commit)(?=[_.])", x)[1]  # type: ignore[index]
        for x in found
    ]


@pytest.mark.parametrize(("site", "schedule"), in_turn(range(len(STEPS)), KINDS, lambda site: STEPS[site][0]))
@pytest.mark.parametrize("group", GROUPS)
def test_every_step_is_needed(group: int, site: int, schedule: str) -> None:
    _, kind, message = STEPS[site]
    with pytest.raises(kind, match=message):
        _kernel(GROUPS[group]).run(schedule, rewrite=_without(site))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", KINDS)
@pytest.mark.parametrize("group", GROUPS)
def test_together_they_are_enough(group: int, schedule: str) -> None:
    setup = Setup(GROUPS[group])
    image, _ = setup.kernel(setup.code()).run(schedule)
    np.testing.assert_array_equal(setup.result(image), setup._words(setup.expected()))


def test_fences_are_about_strictness() -> None:
    def unfenced(text: str) -> str:
        return re.sub(r"tcgen05\.fence::\w+;", "", text)

    _kernel(GROUPS[1]).run(strict=False, rewrite=unfenced)
    with pytest.raises(Race):
        _kernel(GROUPS[1]).run(rewrite=unfenced)


@pytest.mark.parametrize(
    ("columns", "lanes", "written"),
    [
        (range(224, 288), range(32), range(256, 288)),
        (range(224, 288), range(128), range(256, 512)),
        (range(64), range(16, 32), range(64)),
    ],
    ids=["later columns", "later columns of all lanes", "upper half warp"],
)
def test_a_load_is_seen_in_all_of_its_blocks(columns: range, lanes: range, written: range) -> None:
    """Without strictness, a write races with an unordered load that it overlaps in a later block only."""
    memory = TensorMemory(Clocks(8, dependent=False))
    assert memory.shadow is not None
    memory.owner[:] = memory.valid[:] = 1
    memory.load(places(np.arange(32), np.array(columns)), 1, "tcgen05.ld")
    touched = places(np.array(lanes), np.array(written)).cells
    assert memory.shadow.op_write(touched, memory.begin(5, "tcgen05.st")) == Conflict("read", 1)


# --- hand-over between warps ------------------------------------------------------------------------------------------

LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%x0}, [%taddr];"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"


@pytest.fixture(scope="module")
def image() -> Array:
    return np.arange(128 * 8, dtype=np.uint32).reshape(1, 128, 8)


def _hand_over(*between: str) -> list[str]:
    """All warps read columns that a product by one thread then overwrites, after a CTA barrier."""
    descriptor = "shr.u32 %y, %base, 4; or.b32 %y, %y, 0x80000; mov.b32 %x1, 0x4008;"  # 128 bytes, 128 bytes
    word = instruction(128, 8, "f16", "f16")
    operands = f"mov.b64 %a, {{%y, %x1}}; mov.b32 %y, {word}; setp.ne.u32 %p1, %tid, %tid;"
    product = f"{operands} tcgen05.mma.cta_group::1.kind::f16 [%taddr], %a, %a, %y, %p1;"
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];"
    done = ["WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0;", "@!%p1 bra WAIT;", AFTER]
    overwrite = ["@!%lead bra WRITTEN;", product, commit, "WRITTEN: bar.warp.sync 0xffffffff;"]
    return [LOAD, *between, descriptor, *overwrite, *done]


def _run(image: Array, warps: list[str], strict: bool = True, results: int = 0) -> Array:
    smem = np.zeros((1, 4096), np.uint8)
    return Kernel(tmem=image, smem=smem, warps=warps, commit=False, results=results).run(strict=strict)[1]


@pytest.mark.parametrize("missing", [None, WAIT_LD, BEFORE, "bar.sync 0;", AFTER])
def test_reads_are_over_before_columns_are_overwritten(image: Array, missing: str | None) -> None:
    steps = [step for step in (WAIT_LD, BEFORE, "bar.sync 0;", AFTER) if step != missing]
    race = r"tcgen05\.mma .* a read by tcgen05\.ld|tcgen05\.ld.* a write by tcgen05\.mma"
    with reported(missing is not None, Race, race):
        _run(image, _hand_over(*steps))


# --- registers of loads -----------------------------------------------------------------------------------------------

EARLY: dict[str, list[str]] = {
    "arithmetic": [LOAD, "add.u32 %x1, %x0, 1;"],
    "store": [LOAD, "mad.lo.u32 %x2, %tid, 4, %base;", "st.shared.b32 [%x2], %x0;"],
    "store to tensor memory": [LOAD, "tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr+4], {%x0};"],
    "address": [LOAD, "ld.shared.b32 %x1, [%x0];"],
    "a copy": [LOAD, "mov.b32 %x1, %x0;", "mov.b32 %x0, 0;", "add.u32 %x2, %x1, 1;"],
    "half of a pair": [LOAD, "mov.b64 %a, {%x1, %x0};", "mov.b64 {%x2, %x3}, %a;", "add.u32 %x2, %x3, 1;"],
    "a load after the wait": [WAIT_LD, LOAD, "add.u32 %x1, %x0, 1;"],
    "wait for stores": [LOAD, WAIT_ST, "add.u32 %x1, %x0, 1;"],
    "the next iteration": [
        *("mov.b32 %x0, 0;", "mov.b32 %x2, 0;"),
        *("AGAIN: add.u32 %x1, %x0, 1;", LOAD, "add.u32 %x2, %x2, 1;", "setp.lt.u32 %p3, %x2, 2;", "@%p3 bra AGAIN;"),
    ],
    "one of two warps": ["mov.b32 %x0, 1;", f"@%p0 {LOAD}", "add.u32 %x1, %x0, 1;"],
}

LATE: dict[str, list[str]] = {
    "wait": [LOAD, WAIT_LD, "add.u32 %x1, %x0, 1;"],
    "a copy, used after the wait": [LOAD, "mov.b32 %x1, %x0;", WAIT_LD, "add.u32 %x2, %x1, 1;"],
    "a pair, used after the wait": [LOAD, "mov.b64 %a, {%x0, %x0};", WAIT_LD, "mov.b64 {%x1, %x2}, %a;"],
    "another value": [LOAD, "mov.b32 %x0, 5;", "add.u32 %x1, %x0, 1;", WAIT_LD],
    "other registers": [LOAD, "mov.b32 %x1, 5;", "add.u32 %x2, %x1, 1;", WAIT_LD],
    "warps that do not load": ["mov.b32 %x0, 1;", f"@%p0 {LOAD}", "@!%p0 add.u32 %x1, %x0, 1;", WAIT_LD],
    "a branch around load and wait": [
        *("mov.b32 %x0, 1;", "@!%p0 bra WITHOUT;", LOAD, WAIT_LD),
        "WITHOUT: add.u32 %x1, %x0, 1;",
    ],
    "a load ahead of the next iteration": [
        *(LOAD, "mov.b32 %x2, 0;"),
        *(f"AGAIN: {WAIT_LD}", "mov.b32 %x1, %x0;", LOAD, "add.u32 %x3, %x1, 1;", "add.u32 %x2, %x2, 1;"),
        *("setp.lt.u32 %p3, %x2, 2;", "@%p3 bra AGAIN;", WAIT_LD),
    ],
}


@pytest.mark.parametrize("name", EARLY)
def test_registers_used_before_the_wait(image: Array, name: str) -> None:
    with pytest.raises(RegisterFault, match=r"tcgen05\.ld is used before tcgen05\.wait::ld"):
        _run(image, [*EARLY[name], WAIT_LD])
    if name != "address":
        _run(image, [*EARLY[name], WAIT_LD, WAIT_ST], strict=False)


@pytest.mark.parametrize("name", LATE)
def test_registers_used_after_the_wait(image: Array, name: str) -> None:
    _run(image, LATE[name])


def test_values_of_registers_that_are_tested(image: Array) -> None:
    """Tests do not change what a kernel computes."""
    found = _run(image, LATE["warps that do not load"], results=2)
    first = np.arange(128) < 32
    np.testing.assert_array_equal(found[0, :, 0], np.where(first, image[0, :, 0], 1))
    assert (found[0, ~first, 1] == 2).all()


# --- commits ----------------------------------------------------------------------------------------------------------


def _committed_by(lane: int) -> Kernel:
    setup = Setup(Case(n=16))
    warps = [
        f"setp.eq.u32 %p1, %tid, {lane};",
        "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];",
        *("WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0;", "@!%p1 bra WAIT;", AFTER),
    ]
    return setup.kernel(setup.code(), commit=False, warps=warps)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_commit_is_about_the_products_of_its_thread(schedule: str) -> None:
    _committed_by(0).run(schedule)
    with pytest.raises(Race, match=r"a write by tcgen05\.mma of warp 0, lane 0|a read by tcgen05\.ld"):
        _committed_by(1).run(schedule)


def test_products_of_two_threads_are_not_in_order() -> None:
    setup = Setup(Case(n=16))
    again = ["setp.eq.u32 %p3, %tid, 1; @!%p3 bra OTHERS;", setup.code(), "OTHERS: bar.warp.sync 0xffffffff;"]
    with pytest.raises(Race, match=r"races with a write by tcgen05\.mma of warp 0, lane 0"):
        setup.kernel(setup.code(), commit=False, warps=again).run()


@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster;", "fence.proxy.async;", ""])
def test_barriers_of_commits_must_be_visible(image: Array, fence: str) -> None:
    def rewrite(text: str) -> str:
        return text.replace("fence.mbarrier_init.release.cluster;", fence)

    with reported(not fence, BarrierFault, r"fence\.mbarrier_init or fence\.proxy\.async is missing"):
        Kernel(tmem=image, fence=False).run(rewrite=rewrite)
