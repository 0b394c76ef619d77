"""Schedules of batches against models that look at every key and every item, and their bounds as properties."""

from __future__ import annotations

from collections import defaultdict
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cute_attn.errors import RuntimeArgumentError, WorkspaceError
from cute_attn.kernels.host.planner import Room
from cute_attn.problem import BatchLengths, BatchLimits, LaunchSizes
from cute_attn.schedule.batch import typical_qo_len, visible_kv_tiles
from cute_attn.schedule.constants import COMBINE_TIME, CUT_WORTHWHILE, ITEM_TIME, UNIT
from cute_attn.schedule.params import Capacity, SchedulerParams
from cute_attn.schedule.records import NO_PARTIAL, Item, Merge
from cute_attn.schedule.split_kv import MAX_SPLITS
from tests.support import plain_schedule
from tests.support.device_schedules import random_case
from tests.support.makespan import DECODE, PREFILL, lengths_of, makespan
from tests.support.plain_schedule import WorkList, schedule

LIMITS = BatchLimits(workspace_bytes=128 << 20)


def items_of(work: WorkList) -> list[Item]:
    items = [Item(*map(int, row[: len(Item._fields)])) for row in work.items]
    return [item for item in items if item.qo_len]


def merges_of(work: WorkList) -> list[Merge]:
    merges = [Merge(*map(int, row[: len(Merge._fields)])) for row in work.merges]
    return [merge for merge in merges if merge.qo_len]


def visible_keys(params: SchedulerParams, qo_len: int, kv_len: int, token: int) -> range:
    """Returns the keys that a token sees, from the definition of the masks."""
    position = token + kv_len - qo_len
    stop = min(kv_len, position + 1) if params.causal else kv_len
    return range(0 if params.window_left < 0 else max(0, position - params.window_left), max(0, stop))


def visible_tiles(params: SchedulerParams, qo_len: int, kv_len: int, first_row: int) -> set[int]:
    rows = range(first_row, min(first_row + params.rows, qo_len * params.group_size))
    tokens = {row // params.group_size for row in rows}
    return {key // params.cols for token in tokens for key in visible_keys(params, qo_len, kv_len, token)}


def tiles_of(item: Item, params: SchedulerParams) -> range:
    return range(item.kv_begin // params.cols, -(-item.kv_end // params.cols))


shapes = st.builds(
    SchedulerParams,
    rows=st.sampled_from([1, 3, 16]),
    cols=st.sampled_from([1, 2, 8]),
    group_size=st.sampled_from([1, 2, 3, 5, 20]),
    num_kv_heads=st.integers(1, 3),
    causal=st.booleans(),
    window_left=st.integers(-1, 40),
    resident_ctas=st.integers(1, 40),
    min_split_tiles=st.integers(1, 3),
    partial_row_bytes=st.sampled_from([4, 260]),
    l2_kv_tokens=st.sampled_from([0, 1, 40, 100]),
)
lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 90)), max_size=8).map(
    lambda pairs: lengths_of([q for q, _ in pairs], [kv for _, kv in pairs])
)
limits = st.builds(
    BatchLimits,
    workspace_bytes=st.sampled_from([0, 2000, 50_000, 1 << 30]),
    fixed_split_size=st.none() | st.integers(1, 100),
    disable_split_kv=st.booleans(),
    sizes=st.none(),
)


def scheduled(lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits) -> WorkList:
    try:
        return schedule(lengths, params, limits)
    except RuntimeArgumentError:
        assert limits.fixed_split_size is not None
        assume(False)
        raise


def check_coverage(work: WorkList, lengths: BatchLengths, params: SchedulerParams) -> None:
    """Checks that every (request, query tile, visible kv tile) belongs to one item, and nothing else does."""
    found: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for item in items_of(work):
        found[item.request, item.first_row].append(item)
    expected = 0
    for request, kv_len in enumerate(lengths.kv_len.tolist()):
        qo_start, qo_stop = lengths.qo_indptr[request : request + 2].tolist()
        qo_len = qo_stop - qo_start
        for first_row in range(0, qo_len * params.group_size, params.rows):
            expected += 1
            splits = sorted(found[request, first_row], key=lambda item: item.kv_begin)
            visible = visible_tiles(params, qo_len, kv_len, first_row)
            assert [tile for item in splits for tile in tiles_of(item, params)] == sorted(visible)
            for item in splits:
                assert (item.qo_start, item.qo_len, item.kv_len) == (qo_start, qo_len, kv_len)
                assert item.kv_start == lengths.kv_start[request]
                assert (item.mask_high << 32) + item.mask_low == lengths.mask_offset[request]
                assert item.kv_begin % params.cols == 0
                assert item.kv_end <= kv_len
                assert item.kv_begin < item.kv_end or (item.kv_begin, item.kv_end, len(splits)) == (0, 0, 1)
    assert len(found) == expected


def check_partials(work: WorkList, params: SchedulerParams, limits: BatchLimits) -> None:
    """Checks that query tiles with several splits, and only those, have slots, in order and each once, within the
    workspace.
    """
    splits: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for item in items_of(work):
        splits[item.qo_start, item.first_row].append(item)
    slots = []
    merges = {(merge.qo_start, merge.first_row): merge for merge in merges_of(work)}
    assert len(merges) == len(merges_of(work))
    for key, group in splits.items():
        if len(group) == 1:
            assert group[0].partial == NO_PARTIAL
            assert key not in merges
            continue
        merge = merges.pop(key)
        assert merge.qo_len == group[0].qo_len
        assert 2 <= merge.num_splits == len(group) <= MAX_SPLITS
        by_key = sorted(group, key=lambda item: item.kv_begin)
        assert [item.partial - merge.first_partial for item in by_key] == [*range(merge.num_splits)]
        slots += [item.partial for item in group]
    assert not merges
    assert sorted(slots) == list(range(work.num_partials))
    assert work.num_partials * params.num_kv_heads * params.rows * params.partial_row_bytes <= limits.workspace_bytes


@settings(max_examples=400, deadline=None)
@given(lengths, shapes, limits)
def test_every_visible_tile_once_within_the_workspace_longest_first(
    lengths: BatchLengths, params: SchedulerParams, limits: BatchLimits
) -> None:
    work = scheduled(lengths, params, limits)
    check_coverage(work, lengths, params)
    check_partials(work, params, limits)
    if limits.disable_split_kv:
        assert not len(work.merges)
    if limits.fixed_split_size or not len(work.merges):  # no padding
        assert [len(work.items), len(work.merges)] == work.counts


def test_the_host_knows_where_no_split_pays() -> None:
    """By the times of all query tiles. Launches without room for splits lose none, and few without splits have room."""
    rng, roomy, whole = np.random.default_rng(0), 0, 0
    for _ in range(600):
        case = random_case(rng, most_requests=70, most_tokens=4000)
        lengths, limits = lengths_of(case.qo_len, case.kv_len), LIMITS._replace(workspace_bytes=1 << 50)
        params, capacity = case.params, Room.of(lengths, case.params, limits).capacity
        begin, end = visible_kv_tiles(lengths, params)
        times, tiles = np.sort(end - begin)[::-1] * UNIT + ITEM_TIME, len(end)  # the first n run in so many waves
        makespan = max(-(np.arange(1, tiles + 1) * -params.num_kv_heads // params.resident_ctas) * times, default=0)
        share = int(times.sum()) * params.num_kv_heads // params.resident_ctas + COMBINE_TIME
        long = max(end - begin, default=0) >= 2 * params.min_split_tiles
        assert (capacity.merges > 0) == (long and share * CUT_WORTHWHILE[1] <= makespan * CUT_WORTHWHILE[0]), case
        work = schedule(lengths, params, limits, Capacity(tiles * 129, tiles, 1 << 20))
        assert capacity.merges or not work.num_partials, case
        whole += not work.num_partials
        roomy += not work.num_partials and capacity.merges > 0
    assert roomy < 0.1 * whole
    assert not Room.of(lengths_of([0, 1], [100_000, 10]), DECODE, LIMITS).capacity.merges  # keys that no token sees


@st.composite
def graph_plans(draw: st.DrawFn) -> tuple[LaunchSizes, list[BatchLengths]]:
    """Draws the limits of a captured launch, and batches within them, small and as large as they allow."""
    batch_size = draw(st.integers(1, 6))
    most = draw(st.none() | st.integers(1, 12))
    max_rows, max_kv = draw(st.integers(0, 60)), draw(st.integers(0, 300))
    batches = []
    for _ in range(3):
        qo_lens, kv_lens, rows, tokens = [], [], max_rows, max_kv
        for _ in range(batch_size):
            qo_lens.append(draw(st.integers(0, rows if most is None else min(rows, most))))
            kv_lens.append(draw(st.sampled_from([0, tokens]) | st.integers(0, tokens)))
            rows, tokens = rows - qo_lens[-1], tokens - kv_lens[-1]
        batches.append(lengths_of(qo_lens, kv_lens))
    return LaunchSizes(batch_size, max_rows, max_kv, most), batches


@settings(max_examples=400, deadline=None)
@given(graph_plans(), shapes, limits)
def test_every_batch_within_graph_limits_fits_the_same_launch(
    plans: tuple[LaunchSizes, list[BatchLengths]], params: SchedulerParams, limits: BatchLimits
) -> None:
    (sizes, batches), counts = plans, set()
    for lengths in batches:
        work = scheduled(lengths, params, limits._replace(sizes=sizes))
        check_coverage(work, lengths, params)
        check_partials(work, params, limits)
        counts.add((len(work.items), len(work.merges)))
    assert len(counts) == 1


@settings(max_examples=200, deadline=None)
@given(lengths, lengths, shapes, st.integers(1, 100))
def test_fixed_splits_do_not_depend_on_other_requests(
    lengths: BatchLengths, others: BatchLengths, params: SchedulerParams, size: int
) -> None:
    """Compares each request alone with the same request in a larger batch: splits and order of slots are equal."""
    limits = BatchLimits(1 << 40, fixed_split_size=size)

    def splits_of(work: WorkList, request: int) -> list[tuple[int, ...]]:
        mine = [item for item in items_of(work) if item.request == request]
        return sorted((item.first_row, item.kv_begin, item.kv_end, item.partial != NO_PARTIAL) for item in mine)

    qo_lens, kv_lens = np.diff(lengths.qo_indptr).tolist(), lengths.kv_len.tolist()
    more = lengths_of(qo_lens + np.diff(others.qo_indptr).tolist(), kv_lens + others.kv_len.tolist())
    together = scheduled(more, params, limits)
    chunk = -(-size // params.cols) * params.cols
    for request, lens in enumerate(zip(qo_lens, kv_lens, strict=True)):
        alone = schedule(lengths_of([lens[0]], [lens[1]]), params, limits)
        assert splits_of(together, request) == splits_of(alone, 0)
        for _, kv_begin, kv_end, _ in splits_of(alone, 0):
            assert kv_end - kv_begin <= chunk
            assert kv_begin // chunk == max(kv_begin, kv_end - 1) // chunk


def test_a_fixed_split_size_that_does_not_fit_names_the_bytes() -> None:
    message = rf"float_workspace_buffer must have {2 * 8 * 16 * 516} bytes for fixed_split_size=4096.*got 1000"
    with pytest.raises(WorkspaceError, match=message) as error:
        schedule(lengths_of([1, 1], [8192, 4096]), DECODE, BatchLimits(1000, fixed_split_size=4096))
    assert isinstance(error.value, RuntimeError)


def test_a_fixed_split_size_of_too_many_splits_names_one_that_works() -> None:
    lengths = lengths_of([1], [129 * 64])
    message = r"at most 128 parts, got 1 tokens, which make 129; .* needs at least 128"
    with pytest.raises(RuntimeArgumentError, match=message):
        schedule(lengths, DECODE, LIMITS._replace(fixed_split_size=1))
    assert len(schedule(lengths, DECODE, LIMITS._replace(fixed_split_size=128)).items) == 65
    with pytest.raises(RuntimeArgumentError, match="fixed_split_size must be at least 1 token, got 0"):
        schedule(lengths, DECODE, LIMITS._replace(fixed_split_size=0))


def test_a_small_workspace_limits_splits() -> None:
    slot = DECODE.num_kv_heads * DECODE.rows * DECODE.partial_row_bytes
    lengths = lengths_of([1], [131072])
    assert schedule(lengths, DECODE, BatchLimits(33 * slot)).num_partials == 33
    assert 2 <= schedule(lengths, DECODE, BatchLimits(33 * slot - 1)).num_partials <= 32
    assert schedule(lengths, DECODE, BatchLimits(2 * slot - 1)).num_partials == 0


def test_a_decode_graph_has_one_item_per_request_and_capacity_for_splits() -> None:
    sizes = LaunchSizes(batch_size=64, max_rows=64, max_kv_tokens=1 << 20)
    work = schedule(lengths_of([1] * 64, [100] * 64), DECODE, LIMITS._replace(sizes=sizes))
    assert 64 + 33 <= len(work.items) <= 64 + 2 * 33
    assert 33 <= len(work.merges) <= 64
    unsplit = schedule(lengths_of([1] * 64, [100] * 64), DECODE, LIMITS._replace(sizes=sizes, disable_split_kv=True))
    assert (len(unsplit.items), len(unsplit.merges)) == (64, 0)
    short = schedule(lengths_of([1], [1]), DECODE, LIMITS._replace(sizes=sizes._replace(max_kv_tokens=192)))
    assert len(short.merges) == 0


def test_a_known_longest_query_makes_a_fixed_split_graph_smaller() -> None:
    limits = LIMITS._replace(fixed_split_size=4096, sizes=LaunchSizes(64, 64, 1 << 20))
    lengths = lengths_of([1] * 64, [16384] * 64)
    free = schedule(lengths, DECODE, limits)
    known = schedule(lengths, DECODE, limits._replace(sizes=LaunchSizes(64, 64, 1 << 20, max_qo_len=1)))
    assert len(items_of(known)) == len(items_of(free)) == 256
    assert len(known.items) == 64 + 256 < len(free.items)


def test_facts_of_lengths() -> None:
    """What several stages of a plan share."""
    lengths = BatchLengths(np.array([1, 4, 4, 9]), np.zeros(3, np.int64), np.array([7, 0, 12]))
    facts = lengths.qo_len.tolist(), lengths.longest_qo, lengths.longest_kv, lengths.with_queries
    assert facts == ([3, 0, 5], 5, 12, 2)
    assert typical_qo_len(lengths, LIMITS) == typical_qo_len(lengths, LIMITS._replace(max_qo_len=8)) == 4
    empty = BatchLengths(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert (empty.qo_len.tolist(), empty.longest_qo, empty.longest_kv, empty.with_queries) == ([], 0, 0, 0)


# ---- which tiles are cut, of last waves too

CHUNKS = PREFILL._replace(group_size=1, num_kv_heads=40, resident_ctas=132, min_split_tiles=2, l2_kv_tokens=1)
WIDE = CHUNKS._replace(cols=64, num_kv_heads=24, partial_row_bytes=4 * 257)
LONG = CHUNKS._replace(causal=False, rows=192, cols=80, num_kv_heads=16)


def cut_of(work: WorkList) -> tuple[int, int]:
    """Returns how many query tiles are cut, and into how many parts the first of them."""
    merges = merges_of(work)
    return len(merges), merges[0].num_splits if merges else 1


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "params", "cut"),
    [
        ([1], [131072], DECODE, (1, 33)),  # fills the device
        ([1] * 33, [8192] * 33, DECODE, (0, 1)),  # one full wave
        ([1] * 64, [8192] * 64, DECODE, (0, 1)),  # two nearly full waves
        ([1] * 8, [8192] * 8, DECODE, (8, 4)),  # share one wave
        ([1] * 40, [8192] * 40, DECODE, (7, 4)),  # 7 requests after a full wave
        ([1] * 8, [192] * 8, DECODE, (0, 1)),  # too short
        ([1] * 256, [100 + 31 * i for i in range(256)], DECODE, (0, 1)),  # random waves balance themselves
        ([0, 0], [5, 0], DECODE, (0, 1)),
        ([2, 1], [0, 0], DECODE, (0, 1)),
        ([512], [4096], CHUNKS, (1, 4)),  # 160 tiles: 36 of 160 parts run beside the first wave
        ([512], [16384], CHUNKS, (1, 4)),
        ([352, 352], [2817, 2817], WIDE, (1, 7)),  # 144 tiles, one query tile of 24 heads in the last wave
        ([640], [8192], CHUNKS._replace(num_kv_heads=32), (1, 4)),  # causal: tiles of 60 to 64 kv tiles
        ([16384], [16384], LONG, (4, 2)),  # 1376 tiles: 64 after 10 waves
        ([1024] * 9, [1024] * 9, CHUNKS._replace(causal=False, num_kv_heads=16), (0, 1)),  # too short
        ([512], [4096], CHUNKS._replace(num_kv_heads=33), (0, 1)),  # 132 tiles: no last wave
        ([2048], [2048], CHUNKS, (0, 1)),  # causal: longest first balances them
        ([], [], CHUNKS, (0, 1)),
        ([512], [0], CHUNKS, (0, 1)),
    ],
)
def test_which_tiles_are_cut(
    qo_lens: list[int], kv_lens: list[int], params: SchedulerParams, cut: tuple[int, int]
) -> None:
    work = schedule(lengths_of(qo_lens, kv_lens), params, LIMITS)
    assert cut_of(work) == cut
    partial = [item.partial != NO_PARTIAL for item in items_of(work)]
    assert partial == sorted(partial)  # parts come last, whatever L2 holds


@pytest.mark.parametrize(("parts", "cut"), [(5, 5), (4, 4), (3, 3), (1, 1)])
def test_only_within_the_workspace(parts: int, cut: int) -> None:
    lengths = lengths_of([352, 352], [2817, 2817])
    limits = LIMITS._replace(workspace_bytes=(parts + 1) * WIDE.partial_bytes - 1)
    assert cut_of(schedule(lengths, WIDE, limits))[1] == cut


@settings(max_examples=200, deadline=None)
@given(
    requests=st.integers(1, 3),
    qo_len=st.integers(100, 600),
    kv_len=st.integers(100, 6000),
    rows=st.sampled_from([8, 16]),
    num_kv_heads=st.integers(1, 20),
    resident_ctas=st.integers(1, 150),
    causal=st.booleans(),
)
def test_schedules_are_complete_and_hardly_ever_longer(
    requests: int, qo_len: int, kv_len: int, rows: int, num_kv_heads: int, resident_ctas: int, causal: bool
) -> None:
    params = CHUNKS._replace(
        rows=rows, cols=8, num_kv_heads=num_kv_heads, resident_ctas=resident_ctas, partial_row_bytes=260, causal=causal
    )
    lengths = lengths_of([qo_len] * requests, [kv_len] * requests)
    work = schedule(lengths, params, LIMITS)
    with mock.patch.object(plain_schedule, "last_wave", return_value=None):
        before = schedule(lengths, params, LIMITS)
    if np.array_equal(work.ints, before.ints):
        return
    check_coverage(work, lengths, params)
    check_partials(work, params, LIMITS)
    assert makespan(work, params) < 1.05 * makespan(before, params)
