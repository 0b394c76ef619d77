"""Cut last waves: the properties of every schedule, and a shorter launch wherever one is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.problem import BatchLimits
from cute_attn.schedule.batch import SchedulerParams, schedule
from cute_attn.schedule.records import NO_PARTIAL
from tests.schedule.test_batch import PREFILL, batch, check_coverage, check_partials, items_of, merges_of
from tests.support import makespan

LIMITS = BatchLimits(workspace_bytes=512 << 20)
PARAMS = PREFILL._replace(
    group_size=1,
    causal=False,
    resident_ctas=132,
    partial_row_bytes=4 * 257,
    l2_section_heads=2,
    l2_kv_tokens=16384,
    cuts_last_wave=True,
)
WIDE = PARAMS._replace(rows=192, cols=80, num_kv_heads=16, partial_row_bytes=4 * 129)


def cut_tiles(qo_lens: list[int], kv_lens: list[int], params: SchedulerParams, limits: BatchLimits = LIMITS) -> int:
    return len(merges_of(schedule(makespan.lengths_of(qo_lens, kv_lens), params, limits)))


@pytest.mark.parametrize(
    ("length", "params", "cut"),
    [
        (16384, PARAMS, 13),  # 1024 tiles on 132 CTAs: 100 in the last of 8 waves
        (16384, WIDE, 4),  # 1376 tiles: 56 in the last of 11
        (16896, PARAMS, 0),  # 8 waves
        (16384, WIDE._replace(num_kv_heads=32), 0),  # 112 of 132 in the last of 21
        (4096, WIDE, 0),  # a third of a wave is less than the parts and their merge take
        (16384, PARAMS._replace(cuts_last_wave=False), 0),
        (16384, PARAMS._replace(window_left=1 << 20), 0),
    ],
)
def test_where_a_last_wave_is_cut(length: int, params: SchedulerParams, cut: int) -> None:
    assert cut_tiles([length], [length], params) == cut


def test_requests_of_one_length_or_none() -> None:
    assert cut_tiles([8192, 8192], [20000, 20000], PARAMS) == 13
    assert cut_tiles([8192, 8192], [20000, 19900], PARAMS) == 0
    assert cut_tiles([8192, 8192], [0, 0], PARAMS) == 0
    assert cut_tiles([], [], PARAMS) == 0


def test_only_within_the_workspace() -> None:
    needed = 2 * 13 * PARAMS.partial_bytes
    assert cut_tiles([16384], [16384], PARAMS, LIMITS._replace(workspace_bytes=needed)) == 13
    assert cut_tiles([16384], [16384], PARAMS, LIMITS._replace(workspace_bytes=needed - 1)) == 0


def test_the_parts_come_last_whatever_l2_holds() -> None:
    work = schedule(makespan.lengths_of([8192, 8192], [20000, 20000]), PARAMS, LIMITS)
    partial = [item.partial != NO_PARTIAL for item in items_of(work)]
    assert sum(partial) == 26
    assert partial == sorted(partial)


@settings(max_examples=200, deadline=None)
@given(
    requests=st.integers(1, 3),
    qo_len=st.integers(100, 600),
    kv_len=st.integers(100, 6000),
    rows=st.sampled_from([8, 16]),
    num_kv_heads=st.integers(1, 20),
    resident_ctas=st.integers(1, 150),
)
def test_schedules_are_complete_and_never_longer(
    requests: int, qo_len: int, kv_len: int, rows: int, num_kv_heads: int, resident_ctas: int
) -> None:
    params = PARAMS._replace(
        rows=rows, cols=8, num_kv_heads=num_kv_heads, resident_ctas=resident_ctas, partial_row_bytes=260
    )
    lengths = batch([qo_len] * requests, [kv_len] * requests)
    work, before = schedule(lengths, params, LIMITS), schedule(lengths, params._replace(cuts_last_wave=False), LIMITS)
    if not len(work.merges) or len(before.merges):  # split evenly, if at all: parts come last here too
        assert sorted(items_of(work)) == sorted(items_of(before))
        assert np.array_equal(work.merges, before.merges)
        return
    check_coverage(work, lengths, params)
    check_partials(work, params, LIMITS)
    assert makespan.makespan(work, params) < makespan.makespan(before, params)
