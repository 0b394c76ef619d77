"""The host side of fa2 for batches, judged by an interpreter of the kernels' contract."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import numpy as np
import pytest
import torch

from cute_attn.backends import batched, fa2_batch, fa2_kernels
from cute_attn.kernels import tiles
from cute_attn.kernels.spec import Fa2Spec, Tile
from cute_attn.kernels.work import ITEM_INTS
from cute_attn.runtime.arch import named
from cute_attn.runtime.staging import Staging
from tests.batches import Batch, Built, build, random_batch, worst
from tests.fa2_contract import CombineParams, Fa2Params, InterpretedLaunch

SMALL = Tile(16, 16, 1, 1, 2)
ARCH = named("sm_90a")


@pytest.fixture(autouse=True)
def contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter in place of a GPU, and small tiles so that small batches have many."""
    InterpretedLaunch.fired = []
    fa2_kernels.load.cache_clear()
    fa2_batch.ready.cache_clear()
    fa2_batch.tiling.cache_clear()
    monkeypatch.setattr(fa2_kernels, "Launch", InterpretedLaunch)
    monkeypatch.setattr(fa2_kernels, "artifacts", types.SimpleNamespace(get=lambda spec, arch: spec))
    monkeypatch.setattr(batched, "current_stream", lambda index: 77)
    small = types.SimpleNamespace(choose=lambda *args: SMALL, resident_ctas=lambda *args: 2)
    monkeypatch.setattr(fa2_batch, "tiles", small)


def planned(built: Built, staging: Staging | None = None, sms: int = 66) -> fa2_batch.Planned:
    settings = built.problem.settings
    schedule = fa2_batch.scheduled(settings, built.lengths, built.limits, ARCH, sms)
    return fa2_batch.Planned(settings, schedule, staging or Staging(torch.device("cpu")), ARCH, 0)


def solve(batch: Batch, **limits: Any) -> None:
    built = build(batch, **limits)
    planned(built)(built.problem)
    assert worst(built.problem, built.expected()) is None


PREFILL = Batch(qo_lens=(5, 0, 37, 1), kv_lens=(300, 20, 64, 0))
SOURCES = {
    "ragged": {},
    "ragged HND": {"kv_layout": "HND"},
    "page 1": {"page_size": 1},
    "page 5": {"page_size": 5, "kv_layout": "HND"},
    "page 16": {"page_size": 16},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 20, "causal": True},
    "window, open to the right": {"window_left": 150},
    "mask": {"custom_mask": True},
    "mask, window": {"custom_mask": True, "window_left": 30},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"pos_encoding_mode": "ALIBI", "causal": True},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
    "sinks": {"sinks": True},
    "device scales": {"device_scales": True, "v_scale": -2.0},
    "natural lse": {"lse_scale": math.log(2)},
    "no lse": {"return_lse": False},
    "out fp32": {"o_dtype": "float32"},
    "negative scale": {"sm_scale": -0.1},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, source: str) -> None:
    solve(dataclasses.replace(PREFILL, **FEATURES[feature], **SOURCES[source]))


@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int) -> None:
    solve(random_batch(seed, ("", "float8_e4m3fn", "float8_e5m2", "nvfp4"), most=300))


def test_keys_are_cut_and_merged() -> None:
    solve(Batch(kv_lens=(40, 0, 900), v_scale=2.0, sinks=True, lse_scale=math.log(2)))
    main, combine = InterpretedLaunch.fired
    assert main.stream == combine.stream == 77
    assert isinstance(combine.params, CombineParams)
    assert combine.params.rows_per_merge == 3  # the rows of one token
    assert combine.params.slot_rows == SMALL.rows
    assert isinstance(main.spec, Fa2Spec)
    assert main.spec.out_dtype == "float16"  # items that see all keys write the output themselves


def test_no_cut_no_merge() -> None:
    solve(Batch(kv_lens=(40, 0, 900), disable_split_kv=True))
    assert len(InterpretedLaunch.fired) == 1


def test_no_query_tokens_launch_nothing() -> None:
    solve(Batch(qo_lens=(0, 0), kv_lens=(5, 0)))
    assert InterpretedLaunch.fired == []


def test_rows_of_other_requests_stay_as_they_are() -> None:
    """More rows of q and out than the plan knows: the kernel must leave them alone."""
    built = build(Batch(qo_lens=(2, 3), kv_lens=(30, 40)))
    fewer = built.lengths._replace(qo_indptr=np.array([1, 2, 4]))
    planned(dataclasses.replace(built, lengths=fewer))(built.problem)
    assert built.problem.out[[0, 4]].isnan().all()
    assert built.problem.out[1:4].isfinite().all()


def test_settings_of_a_run() -> None:
    """k_scale and v_scale come with the run; a scale that is not positive takes another kernel."""
    built = build(Batch(kv_lens=(40, 10, 900)))
    run = planned(built)
    settings = built.problem.settings
    for change in ({"sm_scale": 0.3}, {"v_scale": 2.0}, {}):
        problem = built.problem._replace(settings=settings._replace(**change))
        run(problem)
        assert worst(problem, dataclasses.replace(built, problem=problem).expected()) is None
    assert len({id(launch) for launch in InterpretedLaunch.fired}) == 2  # no kernel is loaded anew
    features = settings.features._replace(positive_scale=False)
    negative = built.problem._replace(settings=settings._replace(features=features, sm_scale=-0.2))
    run(negative)
    assert worst(negative, dataclasses.replace(built, problem=negative).expected()) is None


def test_graph_launches_keep_their_form() -> None:
    """A second plan of other lengths: same grids, parameters and record addresses."""
    first = Batch(qo_lens=(1,) * 4, kv_lens=(900, 5, 0, 64), graph=True)
    built, staging = build(first), Staging(torch.device("cpu"))
    run = planned(built, staging)
    run(built.problem)
    assert worst(built.problem, built.expected()) is None
    grids = [launch.grid for launch in InterpretedLaunch.fired]
    other = build(dataclasses.replace(first, qo_lens=(1, 0, 1), kv_lens=(64, 3, 700)))
    again = planned(dataclasses.replace(other, limits=built.limits), staging)
    assert [again.plan.grid, again.plan.combine_grid] == grids
    assert again.items == run.items
    assert (again.merges, again.partial_bytes) == (run.merges, run.partial_bytes)


def test_records_are_where_the_launches_look() -> None:
    built = build(Batch(kv_lens=(900, 0, 900)))
    run = planned(built)
    run(built.problem)
    main, combine = InterpretedLaunch.fired
    assert isinstance(main.params, Fa2Params)
    assert isinstance(combine.params, CombineParams)
    items = main.grid[0] // built.problem.settings.features.num_kv_heads
    assert combine.params.merges - main.params.items == 4 * ITEM_INTS * items


@pytest.mark.parametrize("splits", [{"fixed_split_size": 64}, {"disable_split_kv": True}], ids=["fixed", "none"])
def test_fixed_splits_fix_the_tile(splits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a request depend on the tile, which then may not depend on the other requests."""
    monkeypatch.setattr(fa2_batch, "tiles", tiles)
    for max_qo_len in (None, 1):
        found = set()
        for qo_lens in ((1, 1, 1), (1, 1), (1, 100, 7), (300, 1, 64)) if max_qo_len is None else ((1,), (1, 1, 1)):
            built = build(Batch(qo_lens, (70,) * len(qo_lens), **splits))
            limits = built.limits._replace(max_qo_len=max_qo_len)
            found.add(fa2_batch.scheduled(built.problem.settings, built.lengths, limits, ARCH, 132).tile)
        (tile,) = found
        assert (tile.warps_cols > 1) == (max_qo_len == 1)  # decode keeps its own


def test_launches_without_a_gpu() -> None:
    built = build(Batch(kv_lens=(900, 0, 900)))
    named_launches = fa2_batch.launches(built.problem.settings, built.lengths, built.limits, ARCH, 66)
    planned(built)(built.problem)
    assert named_launches == [(launch.spec, launch.grid) for launch in InterpretedLaunch.fired]
