"""Sections of workloads on a CPU: limits of time, summaries, what peers are handed."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from perf import anchors, batch_peers, bench, check, harness, report, sections, warm
from perf.batch_workloads import BatchWorkload, equal
from perf.optional import UnavailableError
from perf.sections import Pace, Section

CPU = torch.device("cpu")
DRAFTS = equal(3, 4, 50, (4, 2), 64, 16, causal=True)
VARIED = [
    DRAFTS,
    BatchWorkload((3, 20), (50, 20), 4, 2, 64, causal=True),
    BatchWorkload((3, 20), (50, 20), 4, 2, 64, 16, causal=True, window_left=9, sinks=True),
    BatchWorkload((1, 1, 1), (50, 7, 16), 4, 2, 64, 16, window_left=15, sinks=True),
    equal(2, 40, 40, (4, 2), 64, causal=True),
]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: Any, sink: Any) -> torch.Tensor:
    """One request, tokens first; `window` and `sink` as flash-attn-4 takes them."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / q.shape[2] ** 0.5
    last = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))
    keep = keys <= last if causal else torch.ones(len(q), len(k), dtype=torch.bool)
    if window is not None:
        keep = keep & (keys >= last - window[0]) & (keys <= last + window[1])
    weights = scores.masked_fill(~keep, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, v.double())


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


@pytest.mark.parametrize("w", VARIED, ids=lambda w: w.name)
def test_flash_attention_4_is_handed_the_problem(w: BatchWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_peers, "module", lambda name: fake_flash_attention_4())
    sets = [w.inputs(CPU, seed) for seed in range(2)]
    for x, call in zip(sets, batch_peers.flash_attention_4(w, sets), strict=True):
        assert check.oracle(w, x).error(call()) < 5e-3  # sinks are rounded to bf16


def test_ours_verify_drafts() -> None:
    assert DRAFTS.phase == "speculative decode"
    assert DRAFTS.metric.unit == "GB/s"
    sets = [DRAFTS.inputs(CPU, seed) for seed in range(2)]
    binds = {n: b for n, b in bench.candidates(DRAFTS.phase, ["auto"]).items() if n.startswith("cute_attn")}
    assert list(binds) == ["cute_attn", "cute_attn xqa function"]
    calls, entries = bench.prepare(DRAFTS, binds, sets)
    assert list(calls) == list(binds), entries


def test_a_backend_that_auto_took_is_not_timed_twice() -> None:
    w = VARIED[1]
    binds = {n: b for n, b in bench.candidates(w.phase, ["auto", "reference"]).items() if n.startswith("cute_attn")}
    calls, entries = bench.prepare(w, binds, [w.inputs(CPU)])
    assert list(calls) == ["cute_attn"]
    assert entries["cute_attn"]["backend"] == "reference"
    assert bench.SAME in entries["cute_attn reference"]["reason"]


def test_rounds_shrink_when_time_gets_short_and_stop_when_it_is_spent() -> None:
    now = [0.0]
    pace = Pace(10, 20, 60.0, clock=lambda: now[0])
    assert pace.next() == 20  # nothing is known yet
    now[0] = 12.0
    pace.finished(12.0, 20)
    assert pace.next() == int(20 * 48 / (9 * 12))
    now[0] = 59.0
    pace.finished(2.0, 8)
    assert pace.next() == sections.FEWEST_ROUNDS
    now[0] = 60.0
    assert pace.next() == 0
    assert Pace(10, 20, None).next() == 20


def row(name: str, ratio: float | None, **speeds: float) -> dict[str, Any]:
    entries = {key.replace("_", " ").replace("cute attn", "cute_attn"): {"speed": s} for key, s in speeds.items()}
    return {"name": name, "ratio": ratio, "candidates": entries}


def test_summary_of_a_section() -> None:
    rows = [
        row("a", 1.2, cute_attn=100.0, cute_attn_xqa=120.0),
        row("b", 0.9, cute_attn=90.0),
        row("c", None, cute_attn=5.0),
    ]
    found = sections.summary(rows)
    assert found["mean"] == pytest.approx(math.sqrt(1.2 * 0.9))
    assert (found["rows"], found["compared"], found["lowest_row"]) == (3, 2, "b")
    assert (found["auto_row"], found["auto"]) == ("a", pytest.approx(100 / 120))
    assert sections.summary([row("c", None)]) == {"rows": 1, "compared": 0}


def test_modules_that_are_not_built_are_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    w = equal(2, 1, 64, (4, 2), 64, 16)
    binds = sections.chosen_binds(w, ["auto"], sections.PEER_NAMES)
    assert {"cute_attn", "FlashInfer fa2", "FlashInfer XQA", "flash-attn-4"} <= set(binds)
    for name in ("FlashInfer fa2", "FlashInfer XQA"):
        with pytest.raises(UnavailableError, match="not built"):
            binds[name](w, [w.inputs(CPU)])
    warm._note("FlashInfer fa2", equal(64, 1, 8192, (4, 2), 64, 16))  # of other lengths
    assert warm.built("FlashInfer fa2", w)
    assert not warm.built("FlashInfer fa2", equal(2, 1, 64, (4, 2), 128, 16))


def test_a_stopped_run_has_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is whole after every row: ones that failed, and ones that no time was left for."""
    good, bad, late = (equal(2, n, n, (4, 2), 64, causal=True) for n in (8, 9, 10))
    written: list[dict[str, Any]] = []

    def run_row(w: BatchWorkload, *rest: Any) -> dict[str, Any]:
        if w == bad:
            raise RuntimeError("out of memory")
        own = {"speed": 3.0, "median_us": 1.0, "p20_us": 1.0, "p80_us": 1.0, "share": 0.5, "error": 0.0}
        measured = {"unit": "GB/s", "sm_clock_mhz": 1, "best_peer": "p", "candidates": {"cute_attn": own}}
        return {**row(w.name, 1.5), **measured}

    for name, value in {
        "compile_ours": lambda jobs: None,
        "CudaGraphTimer": lambda: None,
        "ceilings": lambda *a: {"read": 1.0, "copy": 1.0, "gemm": 1.0},
        "environment": dict,
        "run_row": run_row,
        "save": lambda record, path: written.append(json.loads(json.dumps(record))),
    }.items():
        monkeypatch.setattr(sections, name, value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = types.SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    rounds = iter((7, 7, 0))
    pace = types.SimpleNamespace(next=lambda: next(rounds), finished=lambda seconds, rounds: None)
    monkeypatch.setattr(sections, "Pace", lambda *a: pace)
    options = argparse.Namespace(budget=100.0, rounds=7, peers=(), out=tmp_path / "x.json")
    record = sections.run("anchors", {"one": Section([good, bad, late])}, options)
    assert [len(r["rows"]) + len(r["failed_rows"]) for r in written] == [1, 2, 3]
    assert [r["name"] for r in record["rows"]] == [good.name]
    assert record["failed_rows"] == {
        f"one: {bad.name}": "RuntimeError: out of memory",
        f"one: {late.name}": "the budget of 100 s was spent",
    }
    assert record["summary"]["one"]["mean"] == pytest.approx(1.5)
    environment = dict.fromkeys(("gpu", "date", "commit", "driver", "torch", "cuda", "cudnn"), "?")
    assert "| one | 1 of 1 | 1.500 |" in report.markdown({**record, "environment": environment})


def test_sections_of_the_anchors() -> None:
    assert {name: len(section.workloads) for name, section in anchors.SECTIONS.items()} == {
        "prefill": 24,
        "decode": 24,
        "behind-prefill": 2,
        "behind-decode": 5,
        "other-prefill": 7,
        "other-decode": 15,
    }
    names = [w.name for section in anchors.SECTIONS.values() for w in section.workloads]
    assert len(set(names)) == len(names)
    for section in anchors.MORE.values():
        assert len({w.name for w in section.workloads}) == len(section.workloads) > 0


def test_harness_rounds_are_those_of_the_option() -> None:
    options = sections.parse("anchors", None, anchors.SECTIONS, harness.ROUNDS, ["--only", "decode", "--budget", "9"])
    assert (options.only, options.budget, options.rounds) == (["decode"], 9.0, harness.ROUNDS)
