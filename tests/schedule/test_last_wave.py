"""Cut last waves: which tiles are cut, the properties of every schedule, and shorter launches."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_attn.problem import BatchLimits
from cute_attn.schedule import cost_model
from cute_attn.schedule.batch import SchedulerParams, WorkList, schedule
from cute_attn.schedule.records import NO_PARTIAL
from tests.schedule.test_batch import check_coverage, check_partials, items_of, merges_of
from tests.support import makespan
from tests.support.makespan import PREFILL

LIMITS = BatchLimits(workspace_bytes=512 << 20)
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
def test_where_a_last_wave_is_cut(
    qo_lens: list[int], kv_lens: list[int], params: SchedulerParams, cut: tuple[int, int]
) -> None:
    work = schedule(makespan.lengths_of(qo_lens, kv_lens), params, LIMITS)
    assert cut_of(work) == cut
    partial = [item.partial != NO_PARTIAL for item in items_of(work)]
    assert partial == sorted(partial)  # parts come last, whatever L2 holds


@pytest.mark.parametrize(("parts", "cut"), [(5, 5), (4, 4), (3, 3), (1, 1)])
def test_only_within_the_workspace(parts: int, cut: int) -> None:
    lengths = makespan.lengths_of([352, 352], [2817, 2817])
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
    lengths = makespan.lengths_of([qo_len] * requests, [kv_len] * requests)
    cost_model.best_cut.cache_clear()
    work = schedule(lengths, params, LIMITS)
    cost_model.best_cut.cache_clear()
    with mock.patch.object(cost_model, "last_wave", return_value=None):
        before = schedule(lengths, params, LIMITS)
    cost_model.best_cut.cache_clear()
    if np.array_equal(work.ints, before.ints):
        return
    check_coverage(work, lengths, params)
    check_partials(work, params, LIMITS)
    assert makespan.makespan(work, params) < 1.05 * makespan.makespan(before, params)
