"""Benchmarks on a CPU: formulas against counting, the harness with a fake timer, records, tables."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_attn
from perf import append, bench, harness, latent, overhead, peers, report, run, warm
from perf.harness import ceilings
from perf.machine import UnavailableError
from perf.peers import PEERS, Peer
from perf.rows import ANCHORS, SECTIONS
from perf.workloads import BatchWorkload, equal, one_request
from tests.perf import (
    ABSENT,
    BATCHES,
    CEILINGS,
    CPU,
    WRONG,
    FakeTimer,
    assert_right,
    our_candidates,
    record_of,
    row_of_fakes,
)
from tests.support.dense_attention import seen

DTYPES = ("bfloat16", "e4m3")
ROOT = Path(__file__).parents[2]
SMALL = one_request(96, 128, 4, 2, 64, 64, causal=True, dtype="float16")


@pytest.mark.parametrize("narrow", [False, True])
def test_formula_of_latent_attention(narrow: bool) -> None:
    x = latent.inputs(latent.LatentWorkload(2, 70, 3, q_len=2, narrow=narrow), CPU, 1)[0]
    rows = x.cache.double()[x.table[1].long()].reshape(-1, 576)[:70]
    for token in range(2):  # the last token sees all keys, the one before it all but the last
        weights = torch.softmax(x.q[1, token].double() @ rows[: 69 + token].T * 192**-0.5, -1)
        torch.testing.assert_close(latent.formula(x, 1)[token], weights @ rows[: 69 + token, :512])


def append_inputs(kv_dtype: str) -> tuple[BatchWorkload, append.Inputs]:
    w = equal(2, 20, 20, (2, 2), 64, 16, kv_dtype=kv_dtype)
    x = append.inputs(w, CPU, 0)
    append.by_torch(x)()
    return w, x


def test_appended_rows_are_those_of_the_formula() -> None:
    w, x = append_inputs("bfloat16")
    want = torch.zeros(2, 4, 16, 2, 64, dtype=torch.float64)
    for row in range(40):  # 20 of each request, in its two pages
        request, token = divmod(row, 20)
        page = int(x.table[2][2 * request + token // 16])
        want[:, page, token % 16] = torch.stack([half[row] for half in x.rows]).double()
    assert torch.equal(append.values(x), want)
    read = sum(half.nbytes for half in x.rows)
    assert append.num_bytes(w) == 2 * read  # as much is written
    w, x = append_inputs("nvfp4")
    assert x.scales is not None
    slots = sum(half.nbytes for half in (*x.cache, *x.scales))  # of whole pages: 64 tokens
    assert append.num_bytes(w) == read + slots * 40 // 64


@pytest.mark.parametrize(
    ("kv_dtype", "name", "off", "refused"),
    [
        ("bfloat16", "cute_attn", 0.0, False),
        ("bfloat16", "flashinfer", 1e-3, True),
        ("nvfp4", "cute_attn", 1e-3, True),
        ("nvfp4", "flashinfer", 1e-3, False),  # which may round ties otherwise
        ("nvfp4", "flashinfer", 0.1, True),
        ("bfloat16", "cute_attn", float("nan"), True),
    ],
)
def test_wrong_appends_are_refused(
    kv_dtype: str, name: str, off: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, x = append_inputs(kv_dtype)
    want = append.values(x)
    append.check(x, want, "cute_attn", append.call(cute_attn, x))  # ours, byte for byte
    monkeypatch.setattr(append, "values", lambda _: want * (1 + off))
    with pytest.raises(UnavailableError, match="wrong: relative difference") if refused else contextlib.nullcontext():
        append.check(x, want, name, lambda: None)


@given(st.integers(2, 40), st.integers(1, 40), st.sampled_from(((False, -1), (True, -1), (True, 0), (True, 9))))
def test_pairs_are_counted_exactly(qo_len: int, kv_len: int, mask: tuple[bool, int]) -> None:
    w = BatchWorkload((qo_len,), (kv_len,), 1, 1, 64, causal=mask[0], window_left=mask[1])
    assert w.pairs(0) == seen(qo_len, kv_len, *mask).sum()


def test_work_of_known_problems() -> None:
    prefill = one_request(4096, 4096, 32, 8, 128, 128, causal=True)
    assert prefill.flops == 2 * (4096 * 4097 // 2) * 256 * 32
    assert prefill.metric.unit == "TFLOP/s"
    assert prefill.metric.value(1000.0) == pytest.approx(prefill.flops / 1e-3 / 1e12)
    two_sizes = one_request(100, 200, 16, 16, 192, 128)
    assert two_sizes.flops == 2 * 100 * 200 * (192 + 128) * 16

    decode = one_request(1, 131072, 32, 8, 128, 128)
    assert decode.bytes == 2 * 131072 * 8 * 128 * 2 + 2 * 32 * 128 * 2
    assert decode.metric.unit == "GB/s"
    assert decode.metric.value(130.7) == pytest.approx(4107.6, rel=1e-3)  # bytes over microseconds, by hand
    window = BatchWorkload((1, 1), (100, 9), 4, 2, 64, 16, window_left=15, sinks=True)
    assert window.bytes == 2 * (16 + 9) * 2 * 64 * 2 + 2 * 2 * 4 * 64 * 2
    assert window.name.endswith("full bfloat16 window15 sinks")
    with pytest.raises(ValueError, match="windows of prefill are those of causal rows"):
        BatchWorkload((2,), (100,), 4, 2, 64, window_left=15)


def test_input_sets_exceed_twice_the_l2() -> None:
    w = one_request(1, 8192, 32, 8, 128, 128)
    for l2_bytes in (50 << 20, 126 << 20):
        assert w.num_sets(l2_bytes) * w.bytes > 2 * l2_bytes >= (w.num_sets(l2_bytes) - 1) * w.bytes


def named(name: str, sets: int) -> list[Callable[[], str]]:
    return [lambda i=i: f"{name}{i}" for i in range(sets)]  # type: ignore[misc]


def test_harness_takes_medians_and_spread_of_interleaved_rounds() -> None:
    timer = FakeTimer({"fast": 0.016, "slow": 0.5})
    times, clock = harness.measure({"fast": named("fast", 4), "slow": named("slow", 4)}, timer, rounds=30)
    fast = harness.Timing(**times["fast"])
    assert fast.median_us == pytest.approx(16.0)
    assert (fast.p20_us, fast.p80_us) == (pytest.approx(14.4), pytest.approx(17.6))
    assert fast.rounds == 30
    assert clock == 1755
    timed = timer.order[-60:]
    in_rounds = set(zip(timed[::2], timed[1::2], strict=True))
    assert in_rounds == {("fast", "slow"), ("slow", "fast")}, "every round has both, neither always follows the other"
    assert len(timed) == 60


@pytest.mark.parametrize(("launch_ms", "sets"), [(0.016, 4), (0.002, 121), (0.9, 3), (7.0, 1)])
def test_captures_cycle_through_all_sets_and_are_long_enough(launch_ms: float, sets: int) -> None:
    timer = FakeTimer({"k": launch_ms})
    harness.measure({"k": named("k", sets)}, timer, rounds=3)
    walked = timer.walked[-1]
    assert walked == [f"k{i % sets}" for i in range(len(walked))]
    assert len(walked) % sets == 0
    assert len(walked) >= (harness.MIN_LAUNCHES if launch_ms < harness.SHORT_MS else 1)
    assert len(walked) * launch_ms >= 0.9 * min(harness.GRAPH_MS, harness.MAX_LAUNCHES * launch_ms)


def test_a_candidate_that_cannot_be_captured_is_a_reason() -> None:
    def fails() -> str:
        raise RuntimeError("no kernel for you\nsecond line")

    times, _ = harness.measure({"bad": [fails], "good": named("good", 1)}, FakeTimer({"good": 1.0}), rounds=3)
    assert times["bad"] == {"reason": "not captured: RuntimeError: no kernel for you"}
    assert "median_us" in times["good"]


@given(st.integers(1, 20000))
def test_checked_rows_are_distinct_and_exist(qo_len: int) -> None:
    rows = bench.checked_rows(qo_len)
    assert len(set(rows)) == len(rows) == min(qo_len, bench.NUM_ROWS)
    assert {0, qo_len - 1} <= set(rows)
    assert min(rows) >= 0
    assert max(rows) < qo_len


def test_ceilings_from_times() -> None:
    timer = FakeTimer({"sum": 2.0, "max": 1.0, "copy": 4.0, "gemm": 0.5})
    found = ceilings(timer, CPU, read_bytes=1 << 20, gemm_size=64)
    assert found["read"] == pytest.approx((1 << 20) / 1e-3 / 1e9)  # the faster of two ways to read
    assert found["copy"] == pytest.approx(2 * (1 << 20) / 4e-3 / 1e9)
    assert found["gemm"] == pytest.approx(2 * 64**3 / 0.5e-3 / 1e12)


@pytest.mark.parametrize(
    "w",
    [dataclasses.replace(SMALL, kv_lens=(96,)), one_request(1, 100, 4, 2, 64, 64, dtype="float16"), BATCHES[0]],
    ids=lambda w: w.phase,
)
def test_sdpa_adapter_is_correct(w: BatchWorkload) -> None:
    (adapter,) = [peer for peer in PEERS if peer.name == "torch flash"]
    sets = [w.inputs(CPU, seed) for seed in range(2)]
    assert_right(w, sets, adapter.bind(w, sets))


def test_sdpa_adapter_rejects_masks_that_torch_aligns_differently() -> None:
    with pytest.raises(UnavailableError, match="top-left"):
        PEERS[0].bind(SMALL, [SMALL.inputs(CPU)])


@pytest.mark.parametrize("peer", [p for p in PEERS if not p.name.startswith("torch")], ids=lambda p: p.name)
def test_absent_peers_are_reasons(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    for package in ("flashinfer", "flash_attn"):
        monkeypatch.setitem(sys.modules, package, None)
    w = next(w for w in (SMALL, *BATCHES, one_request(1, 128, 4, 2, 64, 64)) if w.phase in peer.phases)
    with pytest.raises(UnavailableError, match="cannot be imported"):
        peer.bind(w, [w.inputs(CPU)])


@pytest.mark.parametrize("w", BATCHES, ids=lambda w: w.phase)
def test_our_batches_are_correct_and_the_oracle_checks_every_request(w: BatchWorkload) -> None:
    sets = [w.inputs(CPU, seed) for seed in range(2)]
    for x, call in zip(sets, peers.ours(w, sets, backend="auto"), strict=True):
        truth = bench.oracle(w, x)
        right = call()
        assert truth.rejection(truth.error(right)) is None
        for row in (*w.qo_indptr[:-1], *(stop - 1 for stop in w.qo_indptr[1:])):
            wrong = right.clone()
            wrong[row] += 1.0
            assert truth.rejection(truth.error(wrong))
            wrong = right.clone()
            wrong[row, 0, 0] = torch.nan
            assert truth.rejection(truth.error(wrong))


@pytest.mark.parametrize(
    "w",
    [
        *(BatchWorkload((1, 1, 1), (50, 7, 16), 4, 2, 64, 16, kv_dtype=name) for name in (*DTYPES, "nvfp4")),
        equal(3, 4, 50, (4, 2), 64, 16, causal=True),
    ],
    ids=lambda w: f"{w.phase}, {w.kv_dtype}",
)
def test_the_xqa_function_is_a_candidate_next_to_the_wrapper(w: BatchWorkload) -> None:
    assert w.metric.unit == "GB/s"
    sets = [w.inputs(CPU, seed) for seed in range(2)]
    binds = our_candidates(w, "auto")
    assert list(binds) == ["cute_attn", bench.HOST_LENGTHS, "cute_attn xqa function"]
    calls, entries = bench.prepare(w, binds, sets)
    assert list(calls) == list(binds), entries
    assert all(entry["error"] < 5e-3 for entry in entries.values())
    assert "cute_attn xqa function" not in bench.candidates("paged prefill", ["auto"])


def test_work_of_batches() -> None:
    w = BatchWorkload((1, 1), (100, 33), 8, 2, 128, 16, kv_dtype="e4m3")
    assert w.bytes == 2 * 133 * 2 * 128 + 2 * 2 * 8 * 128 * 2
    assert (w.kv_indptr, w.last_page_len) == ([0, 7, 10], [4, 1])
    narrow = dataclasses.replace(w, kv_dtype="nvfp4")
    x = narrow.inputs(CPU)
    assert x.block_scales is not None
    stored = sum(t.nbytes for t in (x.k, x.v, *x.block_scales))  # of whole pages
    assert narrow.bytes - x.q.nbytes * 2 == stored * 133 // (16 * narrow.kv_indptr[-1])
    prefill = BatchWorkload((10, 5), (10, 9), 4, 2, 64, causal=True)
    assert prefill.flops == (55 + 35) * 4 * 64 * 4


def test_pages_of_a_request_lie_in_any_order() -> None:
    w = BatchWorkload((1, 1), (40, 20), 4, 2, 64, 16)
    x = w.inputs(CPU)
    assert x.indices is not None
    k, v = w.tokens(x, 1)
    assert k.shape == (20, 2, 64)
    assert torch.equal(k[17].to(x.k.dtype), x.k[x.indices[4], 1])
    assert torch.equal(v[3].to(x.v.dtype), x.v[x.indices[3], 3])
    assert peers.block_table(w, x).tolist() == [x.indices[:3].tolist(), [*x.indices[3:].tolist(), 0]]


def test_dense_peers_take_equal_requests_only() -> None:
    for w, why in ((BATCHES[1], "differ in length"), (equal(2, 8, 8, (4, 2), 64, 4), "paged")):
        with pytest.raises(UnavailableError, match=why):
            peers.dense(w, w.inputs(CPU))


def test_a_single_request_is_a_batch_of_one_whose_pages_are_in_order() -> None:
    w = one_request(1, 64, 4, 2, 64, 64)
    sets = [w.inputs(CPU, seed) for seed in range(2)]
    assert_right(w, sets, peers.in_pages(peers.our_xqa, w, sets))
    with pytest.raises(UnavailableError, match="multiple of the page size 16, got 70"):
        peers.in_pages(peers.our_xqa, dataclasses.replace(w, kv_lens=(70,)), sets)


FAKES = {"cute_attn": 1.0, "peer A": 1.25, "peer B": WRONG, "peer C": ABSENT, "peer D": 2.0}


def test_row_has_speed_share_ratio_error_and_reasons() -> None:
    row = row_of_fakes(SMALL, FAKES)
    ours, a = row["candidates"]["cute_attn"], row["candidates"]["peer A"]
    assert ours["median_us"] == pytest.approx(1000.0)
    assert ours["speed"] == pytest.approx(SMALL.flops / 1e-3 / 1e12)
    assert ours["share"] == pytest.approx(ours["speed"] / CEILINGS["gemm"])
    assert ours["error"] < 1e-4
    assert row["best_peer"] == "peer A"
    assert row["ratio"] == pytest.approx(1.25)
    assert a["p20_us"] < a["median_us"] < a["p80_us"]
    assert row["candidates"]["peer B"]["reason"].startswith("wrong: relative error")
    assert "speed" not in row["candidates"]["peer B"]
    assert row["candidates"]["peer C"]["reason"] == "UnavailableError: it is not installed"
    assert row["input_sets"] == SMALL.num_sets(1 << 16)


def test_ratio_needs_both_sides() -> None:
    fast, absent = {"speed": 2.0}, {"reason": "no"}
    assert bench.compare_with_peers({"cute_attn": fast, "x": absent}) == {"best_peer": None, "ratio": None}
    assert bench.compare_with_peers({"cute_attn": absent, "x": fast}) == {"best_peer": "x", "ratio": None}


def test_markdown_shows_every_number_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of_fakes(SMALL, FAKES)
    bench.save(record_of(row), tmp_path / "deep" / "record.json")
    report.main([str(tmp_path / "deep" / "record.json")])
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if SMALL.name in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    speed = row["candidates"]["cute_attn"]["speed"]
    assert cells[1].startswith(f"{speed:.1f} (")
    assert cells[-3] == "1.25 (peer A)"
    assert cells[-1] == "1755"
    assert "peer C: UnavailableError: it is not installed (1 of 1 rows)" in shown
    assert "- a long row: OutOfMemoryError: too long" in shown
    assert "bf16 GEMM 700 TFLOP/s" in shown


@pytest.mark.parametrize("path", sorted((ROOT / "perf/results").glob("*.json")), ids=lambda path: path.stem)
def test_reports_show_every_record(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(path)])
    shown = capsys.readouterr().out
    assert json.loads(path.read_text())["environment"]["date"] in shown
    assert "| --- |" in shown


def test_host_times_divide_wall_time_by_calls() -> None:
    ticks = itertools.count(0, 50_000)  # the clock is read at both ends of a round, 50 us apart
    waits: list[None] = []
    calls = {"run": lambda: None, "a plan": lambda: None}
    found = overhead.host_times(calls, lambda: waits.append(None), lambda: next(ticks), repeats=5)
    assert found["run"].median_us == pytest.approx(50 / overhead.CALLS)
    assert found["a plan"].median_us == pytest.approx(50 / overhead.PLANS)
    assert {timing.rounds for timing in found.values()} == {5}
    assert len(waits) == 2 * 6 + 1  # before each of 5 + 1 rounds of two calls, and at the end


def test_growing_cache_takes_every_length() -> None:
    seen: list[tuple[int, int]] = []
    w = one_request(1, 5, 2, 1, 64, 64)
    grow = overhead.GrowingCache(w.inputs(CPU), lambda q, k, v: seen.append((len(k), len(v))))
    for _ in range(6):
        grow()
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (1, 1)]


def test_overhead_calls_run() -> None:
    kinds = overhead.calls, overhead.unplanned_calls, overhead.batch_calls
    for calls in (*kinds, overhead.optional_calls, overhead.latent_calls):
        for call in calls(CPU).values():
            call()
    stages = overhead.parts(CPU)
    assert len(stages) == 5
    for name in list(stages)[:4]:  # the last one needs a CUDA stream
        stages[name]()


def test_builds_are_distinct_and_of_the_right_phase() -> None:
    for section in SECTIONS.values():
        workloads = section.workloads
        jobs = warm.builds(workloads)
        assert jobs
        assert len({warm.module_of(*job) for job in jobs}) == len(jobs)
        asked = {warm.module_of(p.name, w) for w in workloads for p in PEERS if p.builds and w.phase in p.phases}
        assert {warm.module_of(*job) for job in jobs} == asked, "a short workload asks for the module of the long one"
        for name, w in jobs:
            assert any(p.builds and p.name == name and w.phase in p.phases for p in PEERS)
            assert w.bytes < 1 << 26  # short
    assert {name for name, _ in warm.builds(SECTIONS["single-prefill"].workloads, ["FlashInfer fa2"])} == {
        "FlashInfer fa2"
    }
    assert all(w.qo_lens == (1,) for _, w in warm.builds(SECTIONS["single-decode"].workloads))


def test_rows_are_selected_by_words_and_have_names_of_their_own() -> None:
    for section in SECTIONS.values():
        assert len({w.name for w in section.workloads}) == len(section.workloads) > 0
    anchors = [w.name for section in ANCHORS.values() for w in section.workloads]  # whose tables have several sections
    assert len(set(anchors)) == len(anchors)
    rows = SECTIONS["single-prefill"].workloads
    assert len(run.select(rows, ["d128", "causal", "h32/8"])) == len(run.select(rows, ["d128 causal h32/8"])) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message on a machine without a GPU")
@pytest.mark.parametrize("command", ["run single-prefill", "run anchors random", "tune decode --around", "overhead"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_reason_is_given_without_a_gpu(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", command.split())
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"perf.{sys.argv[0]}", run_name="__main__")
    assert ended.value.code == 2
    assert "Nothing can be measured" in capsys.readouterr().err
