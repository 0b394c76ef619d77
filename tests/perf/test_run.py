"""Sections of workloads on a CPU: limits of time, summaries, what peers are handed."""

from __future__ import annotations

import argparse
import itertools
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from perf import bench, peers, program, report, rows, run, warm
from perf.machine import UnavailableError
from perf.rows import ANCHORS, GROUPS, SECTIONS, Section
from perf.run import Pace
from perf.workloads import BatchWorkload, equal
from tests.perf import BATCHES, ENVIRONMENT, our_candidates
from tests.support import dense_attention
from tests.support.dense_attention import seen

CPU = torch.device("cpu")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: Any, sink: Any) -> torch.Tensor:
    """One request, tokens first; `window` and `sink` as flash-attn-4 takes them."""
    keep = seen(len(q), len(k), causal or window is not None, -1 if window is None else window[0])
    return dense_attention.attention(q, k, v, keep, sinks=sink)[0]


def fake_flash_attention_4() -> Any:
    """Its two functions, by the meaning that their documentation gives the arguments."""

    def dense(q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = None, learnable_sink: Any = None) -> Any:
        return torch.stack([attention(*x, causal, window_size, learnable_sink) for x in zip(q, k, v, strict=True)])

    def varied(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
        max_seqlen_k: Any = None, seqused_k: Any = None, page_table: Any = None, causal: bool = False,
        window_size: Any = None, learnable_sink: Any = None,
    ) -> Any:  # fmt: skip
        if cu_seqlens_q is not None:
            own = [q[a:b] for a, b in itertools.pairwise(cu_seqlens_q.tolist())]
            assert max_seqlen_q == max(map(len, own))
        else:
            own = list(q)
        if page_table is not None:
            kv = [[t[page_table[i].long()].flatten(0, 1)[:n] for t in (k, v)] for i, n in enumerate(seqused_k.tolist())]
        else:
            kv = [[t[a:b] for t in (k, v)] for a, b in itertools.pairwise(cu_seqlens_k.tolist())]
        assert max_seqlen_k == max(len(t) for t, _ in kv)
        return torch.cat([attention(x, *y, causal, window_size, learnable_sink) for x, y in zip(own, kv, strict=True)])

    return types.SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varied)


@pytest.mark.parametrize("w", BATCHES, ids=lambda w: w.name)
def test_flash_attention_4_is_handed_the_problem(w: BatchWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "module", lambda name: fake_flash_attention_4())
    sets = [w.inputs(CPU, seed) for seed in range(2)]
    for x, call in zip(sets, peers.flash_attention_4(w, sets), strict=True):
        assert bench.oracle(w, x).error(call()) < 5e-3  # sinks are rounded to bf16


def test_a_backend_that_auto_took_is_not_timed_twice() -> None:
    w = BATCHES[1]
    calls, entries = bench.prepare(w, our_candidates(w, "auto", "reference"), [w.inputs(CPU)])
    assert list(calls) == ["cute_attn", bench.HOST_LENGTHS]
    assert entries["cute_attn"]["backend"] == "reference"
    assert bench.SAME in entries["cute_attn reference"]["reason"]


def test_rounds_shrink_when_time_gets_short_and_stop_when_it_is_spent() -> None:
    now = [0.0]
    pace = Pace([20] * 10, 60.0, clock=lambda: now[0])
    assert pace.next() == 20  # nothing is known yet
    now[0] = 10.5
    pace.finished(10.5, 20, per_round=0.5)
    assert pace.next() == int((49.5 / 9 - 0.5) / 0.5)
    pace.left[0] = 40  # of a row that should have twice as many
    assert pace.next() == int((49.5 * 40 / (40 + 8 * 20) - 0.5) / 0.5)
    now[0] = 59.0
    pace.finished(2.0, 8, per_round=0.2)
    assert pace.next() == run.FEWEST_ROUNDS
    now[0] = 60.0
    assert pace.next() == 0
    assert Pace([20] * 10, None).next() == 20


def test_a_row_of_many_rounds_knows_what_one_costs() -> None:
    entries = {"a": {"median_us": 100.0, "launches": 50}, "b": {"median_us": 10.0, "launches": 20}, "c": {"reason": ""}}
    assert run.seconds_of_round({"candidates": entries}) == pytest.approx(0.0052)


def row(name: str, ratio: float | None, **speeds: float) -> dict[str, Any]:
    entries = {key.replace("_", " ").replace("cute attn", "cute_attn"): {"speed": s} for key, s in speeds.items()}
    return {"name": name, "ratio": ratio, "candidates": entries}


def test_summary_of_a_section() -> None:
    rows = [
        row("a", 1.2, cute_attn=100.0, cute_attn_xqa=120.0, cute_attn_host_lengths=125.0),
        row("b", 0.9, cute_attn=90.0),
        row("c", None, cute_attn=5.0),
    ]
    found = bench.summary(rows)
    assert found["mean"] == pytest.approx(math.sqrt(1.2 * 0.9))
    assert (found["rows"], found["compared"], found["lowest_row"]) == (3, 2, "b")
    assert (found["auto_row"], found["auto"]) == ("a", pytest.approx(100 / 120))
    assert bench.summary([row("c", None)]) == {"rows": 1, "compared": 0}


def test_modules_that_are_not_built_are_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    w = equal(2, 1, 64, (4, 2), 64, 16)
    binds = run.chosen_binds(w, ["auto"], run.PEER_NAMES)
    assert {"cute_attn", "FlashInfer fa2", "FlashInfer XQA", "flash-attn-4"} <= set(binds)
    for name in ("FlashInfer fa2", "FlashInfer XQA"):
        with pytest.raises(UnavailableError, match="not built"):
            binds[name](w, [w.inputs(CPU)])
    warm._note("FlashInfer fa2", equal(64, 1, 8192, (4, 2), 64, 16))  # of other lengths
    assert warm.built("FlashInfer fa2", w)
    assert not warm.built("FlashInfer fa2", equal(2, 1, 64, (4, 2), 128, 16))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that measures nothing; its state."""
    state: dict[str, Any] = {"broken": False, "rounds": iter((7,) * 9), "written": []}

    def run_row(w: BatchWorkload, binds: Any, *rest: Any) -> dict[str, Any]:
        own = {"speed": 3.0, "median_us": 1.0, "p20_us": 1.0, "p80_us": 1.0, "share": 0.5, "error": 0.0, "launches": 1}
        entries = {"cute_attn": own}
        if w.kv_lens[0] == 9:
            raise RuntimeError("out of memory")
        if w.kv_lens[0] == 11 and "flash-attn-4" in binds:
            state["broken"] = True
            entries["flash-attn-4"] = {"reason": "AcceleratorError: CUDA error: illegal memory access"}
        more = {"unit": "GB/s", "sm_clock_mhz": 1, "best_peer": "p", "candidates": entries}
        return {**row(w.name, 1.5), **more}

    class Again(Exception):
        """Where a new process would start."""

    def start_again() -> None:
        raise Again

    state["again"] = Again
    pace = types.SimpleNamespace(next=lambda: next(state["rounds"]), finished=lambda *a: None)
    for name, value in {
        "compile_ours": lambda jobs, meanwhile: None,
        "ceilings": lambda *a: {"read": 1.0, "copy": 1.0, "gemm": 1.0},
        "run_row": run_row,
        "Pace": lambda *a: pace,
        "context_is_broken": lambda: state["broken"],
        "start_again": start_again,
    }.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(program, "environment", lambda: ENVIRONMENT)
    save = run.save
    monkeypatch.setattr(run, "save", lambda r, path: (state["written"].append(len(r["rows"])), save(r, path)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=1))
    return state


def test_a_stopped_run_has_its_rows(machine: dict[str, Any], tmp_path: Path) -> None:
    """The record is whole after every row: ones that failed, and ones that no time was left for."""
    good, bad, late = (equal(2, n, n, (4, 2), 64, causal=True) for n in (8, 9, 10))
    machine["rounds"] = iter((7, 7, 0))
    options = argparse.Namespace(budget=100.0, rounds=7, peers=(), out=tmp_path / "x.json", resume=False)
    record = run.run("run", {"one": Section([good, bad, late])}, options)
    assert machine["written"] == [1, 1, 1]
    assert [r["name"] for r in record["rows"]] == [good.name]
    assert record["failed_rows"] == {
        f"one: {bad.name}": "RuntimeError: out of memory",
        f"one: {late.name}": "the budget of 100 s was spent",
    }
    assert "| one | 1 of 1 | 1.500 |" in report.markdown(record)


def test_a_peer_that_breaks_the_context_costs_its_own_result_alone(machine: dict[str, Any], tmp_path: Path) -> None:
    rows = [equal(2, n, n, (4, 2), 64, causal=True) for n in (8, 11, 12)]
    options = argparse.Namespace(budget=None, rounds=7, peers=("flash-attn-4",), out=tmp_path / "x.json", resume=False)
    with pytest.raises(machine["again"]):
        run.run("run", {"one": Section(rows)}, options)
    machine["broken"] = False  # a new process
    options.resume = True
    record = run.run("run", {"one": Section(rows)}, options)
    assert [r["name"] for r in record["rows"]] == [w.name for w in rows]
    assert record["rows"][1]["candidates"]["flash-attn-4"] == {"reason": "it broke the CUDA context"}
    assert record["failed_rows"] == {}


def test_groups_and_sections_are_chosen_by_name() -> None:
    assert all(name in SECTIONS for names in GROUPS.values() for name in names)
    chosen = run.chosen_sections(["anchors", "vit", "prefill", "random"], ["d64"], seed=3)
    assert list(chosen) == [*ANCHORS, "vit", *rows.RANDOM_NAMES]
    assert {w.name.split()[0] for w in chosen["prefill"].workloads} == {"d64"}
    assert "random-decode" not in run.chosen_sections(["decode"], [], seed=3)


def test_backends_are_those_of_the_section_or_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "gpu", lambda: CPU)
    parser = run.parser("run", None)
    options = parser.parse_args(["decode", "--budget", "9"])
    assert (options.sections, options.budget, options.rounds) == (["decode"], 9.0, None)
    assert run.measured_sections(options)["decode"].backends == ("auto", "fa2", "xqa")
    found = run.measured_sections(parser.parse_args(["decode", "--backends", "fa2"]))
    assert found["decode"].backends == ("fa2",)
    with pytest.raises(SystemExit, match="2"):
        run.measured_sections(parser.parse_args(["decode", "--rows", "d7"]))


def test_a_run_measures_further_candidates(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bound with those that every row has."""
    seen: list[str] = []
    monkeypatch.setattr(run, "_measured", lambda record, section, w, binds, rounds: seen.extend(binds))
    options = argparse.Namespace(budget=None, rounds=7, peers=("flash-attn-4",), out=None, resume=False)
    one = equal(2, 8, 8, (4, 2), 64, causal=True)
    run.run("tune", {"x": Section([one])}, options, lambda w: {"cute_attn 8x8": lambda w, sets: []})
    assert seen == ["cute_attn", bench.HOST_LENGTHS, "flash-attn-4", "cute_attn 8x8"]


def test_random_rows_are_those_of_their_seed() -> None:
    drawn = rows.drawn(3)
    assert drawn == rows.drawn(3) != rows.drawn(4)
    assert len(drawn) == rows.RANDOM_ROWS
    assert len({w.name for w in drawn}) == len(drawn)
    chosen = rows.random_sections(3)
    assert [len(chosen[name].workloads) for name in ("random-prefill", "random-decode")] == [len(drawn) // 2] * 2
    for w in drawn:
        assert 8 <= w.num_qo_heads <= 64
        assert w.num_qo_heads % w.num_kv_heads == 0
        assert all(qo_len <= kv_len for qo_len, kv_len in zip(w.qo_lens, w.kv_lens, strict=True))
