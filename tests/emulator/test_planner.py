"""The planner kernel on the emulator: its schedules are those of a plain program, and it keeps within its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_attn.emulator.settings import using
from cute_attn.errors import RuntimeArgumentError
from cute_attn.kernels.host.gpu import Gpu
from cute_attn.kernels.host.planner import Room
from cute_attn.problem import BatchLimits, DeviceLengths
from cute_attn.runtime.arch import named
from cute_attn.runtime.launch import CPU
from cute_attn.runtime.staging import Staging
from cute_attn.schedule.records import ITEM_INTS, MERGE_INTS, NO_PARTIAL, Item, Merge
from tests.support.device_schedules import Case, bounded, cases, difference, launch, room_of
from tests.support.makespan import DECODE, PREFILL, lengths_of

pytestmark = pytest.mark.emulator

LIMITS = BatchLimits(workspace_bytes=128 << 20)
WAVES = PREFILL._replace(group_size=1, causal=False, resident_ctas=132, l2_kv_tokens=9000)
L2 = DECODE._replace(l2_kv_tokens=40_000, resident_ctas=40)


def emulated(arch: str) -> Gpu:
    return Gpu(named(arch), CPU, 132)


def case(qo_len: object, kv_len: object, params: object = DECODE, limits: BatchLimits = LIMITS, page: int = 16) -> Case:
    qo, kv = np.asarray(qo_len, np.int64), np.asarray(kv_len, np.int64)
    return bounded(Case(qo, kv, page, 0, params, limits), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arch", "seed", "count"), [("sm_90a", 0, 70), ("sm_80", 1, 8)])
def test_schedules_are_those_of_a_plain_program(arch: str, seed: int, count: int) -> None:
    """Of lengths on the device and on the host. Later architectures have Hopper's PTX."""
    with using(arch, checks=False):
        for i, drawn in enumerate(cases(count, seed, most_requests=100)):
            assert difference(drawn, emulated(arch), "cpu", on_host=i % 2 > 0) is None


RNG = np.random.default_rng(3)
SHAPES = {
    "no queries": case([0, 0, 0], [5, 0, 70]),
    "no keys": case([1, 3], [0, 0]),
    "one token": case([1], [1], page=0),
    "longer than any histogram has bins": case(np.ones(30), RNG.integers(1, 200_000, 30)),
    "4096 requests in L2 groups": case(np.ones(4096), RNG.integers(0, 5000, 4096), L2),
    "20000 items": case([100_000, 300, 0, 60_000], [100_000, 9000, 5, 200_000], PREFILL._replace(rows=32)),
    "no room for partials": case(np.ones(8), np.full(8, 9000), limits=LIMITS._replace(workspace_bytes=0)),
    "a cut last wave": case([16384], [16384], WAVES, page=0),
    "a cut last wave of two requests": case([8192, 8192], [20000, 20000], WAVES),
    "a cut last wave of unequal requests": case([8192, 8192], [20000, 19900], WAVES),
    "a last wave that is nearly full": case([9600], [20000], WAVES._replace(resident_ctas=16), page=0),
    "a cut last wave of chunks": case([640], [8192], WAVES._replace(causal=True)),
    "splits of a fixed size": case([1, 30, 0], [5000, 9000, 0], limits=LIMITS._replace(fixed_split_size=777)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_at_their_ends(name: str) -> None:
    with using("sm_90a", checks=False):
        assert difference(SHAPES[name], emulated("sm_90a"), "cpu") is None


# All barriers, some of which only more requests than threads need.
SYNCHRONISED = (
    case([], []),
    case([1], [1 << 30]),
    case([*np.ones(63), 900], [*RNG.integers(100, 9000, 63), 3000], PREFILL),  # a batch of an engine
    case(np.ones(1100), RNG.integers(1, 5000, 1100), L2),
)


def test_without_races() -> None:
    with using("sm_90a"):
        for problem in SYNCHRONISED:
            assert difference(problem, emulated("sm_90a"), "cpu") is None


def test_schedules_follow_one_another_in_the_same_memory() -> None:
    """Records that a schedule leaves behind do not reach the next one, whether capacities are equal or not."""
    largest = case(np.full(6, 40), [9000, 9000, 5000, 20, 300, 9000], PREFILL)
    staging, counts = Staging(torch.device("cpu")), []
    with using("sm_90a", checks=False):
        for kv_len in ([9000, 9000, 5000, 20, 300, 9000], [1, 0, 0, 2, 3, 4], [20_000, 0, 0, 0, 5, 9000]):
            now = largest._replace(kv_len=np.asarray(kv_len), qo_len=np.asarray([40, 0, 40, 40, 1, 40]))
            assert difference(now, emulated("sm_90a"), "cpu", staging) is None
            counts.append(staging.memory[2][0].item())
        assert counts[1] < min(counts[0], counts[2])
        for other in (SHAPES["splits of a fixed size"], SHAPES["a cut last wave of chunks"], largest):
            assert difference(other, emulated("sm_90a"), "cpu", staging) is None


WRONG = {
    "decreasing": ([0, 40, 20, 80, 3], [0, 30, 10, 60, 2], [3, 99, -5, 16]),
    "negative": ([-5, -3, -9, 4, 9], [-100, -1, 1 << 30, -4, 7], None),  # without pages
    "huge": ([0, 1 << 30, 5, (1 << 31) - 1, 80], [0, (1 << 31) - 1, 0, 1 << 30, 9], [1 << 30, -(1 << 31), 16, 1]),
    "overlapping": ([0, 80, 0, 80, 0], [0, 60, 0, 60, 0], [16, 16, 16, 16]),
}


@pytest.mark.parametrize("limits", [LIMITS, LIMITS._replace(fixed_split_size=128)], ids=["free", "fixed"])
@pytest.mark.parametrize("name", WRONG)
def test_index_arrays_that_are_wrong_reach_no_other_memory(name: str, limits: BatchLimits) -> None:
    """The emulator faults on accesses elsewhere; records only name rows, pages and partials that exist."""
    params = PREFILL._replace(rows=16, resident_ctas=4, l2_kv_tokens=1)  # in L2 groups where the size is fixed
    valid = bounded(Case(*(np.full(4, n) for n in (20, 240)), 16, 0, params, limits), 0)
    capacity = room_of(valid).capacity
    qo_indptr, kv_indptr, last = (None if x is None else torch.tensor(x).int() for x in WRONG[name])
    with using("sm_90a"):
        lengths = DeviceLengths(qo_indptr, kv_indptr, last, 60)
        records, _ = launch(valid, lengths, emulated("sm_90a"), Staging(torch.device("cpu")))
    split = ITEM_INTS * capacity.items
    for row in records[:split].reshape(-1, ITEM_INTS).tolist():
        item = Item(*row[: len(Item._fields)])
        if item.qo_len:
            assert 0 <= item.qo_start < item.qo_start + item.qo_len <= 80
            assert 0 <= item.first_row < item.qo_len * valid.params.group_size
            assert 0 <= item.kv_begin <= item.kv_end <= item.kv_len
            assert 0 <= item.kv_start <= item.kv_start + -(-item.kv_len // 16) <= 60
            assert NO_PARTIAL <= item.partial < capacity.partials
            assert 0 <= item.request < 4
    for row in records[split:].reshape(-1, MERGE_INTS).tolist():
        merge = Merge(*row[: len(Merge._fields)])
        assert 0 <= merge.first_partial <= merge.first_partial + merge.num_splits <= capacity.partials
        assert merge.qo_start + merge.qo_len <= 80


def test_it_refuses_what_it_cannot_count() -> None:
    longest = case([1], [1 << 20])
    sizes = longest.limits.sizes
    assert sizes is not None
    many_splits, small = {"fixed_split_size": 64}, {"fixed_split_size": 1 << 19, "workspace_bytes": 1000}
    many_items = {"sizes": sizes._replace(batch_size=1 << 25, max_rows=1 << 25)}
    assert Room.bounded(DECODE, longest.limits)
    for change in (many_splits, small, many_items):
        assert not Room.bounded(DECODE, longest.limits._replace(**change))
    roomy = longest.limits._replace(sizes=sizes._replace(max_kv_tokens=1 << 31))
    assert Room.of(lengths_of([1], [1 << 30]), DECODE, roomy)
    with pytest.raises(RuntimeArgumentError, match=f"got {1 << 25} for {1 << 25} query tokens"):
        Room.of(lengths_of([1 << 25], [1]), DECODE._replace(rows=1, group_size=1), LIMITS)
