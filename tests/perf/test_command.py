"""`python -m cute_attn bench` and `perf.coldstart` on a CPU."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_attn.cli import bench as cli
from cute_attn.errors import ArgumentError, ArtifactError
from perf import bench, coldstart, command, machine, program
from perf.workloads import BatchWorkload, equal, one_request
from tests.perf import ABSENT, record_of, row_of_fakes
from tests.support.commands import printed

ROOT = Path(__file__).parents[2]
DECODE, RAGGED, PAGED = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
)


def asked(routine: str, *argv: str) -> list[Any]:
    return command.workloads(command.parse(["--routine", routine, *argv]))


def test_flags_become_the_problem() -> None:
    heads = ("--num_qo_heads", "64", "--num_kv_heads", "8", "--head_dim_qk", "64")
    more = ("--window_left", "127", "--sinks", "--kv_dtype", "fp8_e4m3", "--page_size", "32")
    (w,) = asked(DECODE, "--batch_size", "4", "--s_kv", "300", *heads, *more)
    assert w == equal(4, 1, 300, (64, 8), 64, 32, kv_dtype="e4m3", window_left=127, sinks=True)
    (w,) = asked(PAGED, "--s_qo", "100", "--s_kv", "300", "--causal", "--q_dtype", "float16")
    assert w == BatchWorkload((100,), (300,), 32, 8, 128, 16, True, "float16", "float16")
    (w,) = asked(RAGGED, "--s_kv", "300", "--batch_size", "2")
    assert w == equal(2, 300, 300, (32, 8), 128)
    (w,) = asked(DECODE, "--s_qo", "3", "--s_kv", "64")
    assert w.phase == "speculative decode"
    (w,) = asked(RAGGED, "--s_kv", "64", "--head_dim_qk", "192", "--head_dim_vo", "128", "--causal")
    assert w == one_request(64, 64, 32, 8, 192, 128, causal=True)


def test_several_values_make_several_rows() -> None:
    found = asked(DECODE, "--batch_size", "1", "8", "--s_kv", "64", "128", "256")
    assert [(len(w.kv_lens), w.kv_lens[0]) for w in found] == [(b, n) for b in (1, 8) for n in (64, 128, 256)]
    (w,) = asked(PAGED, "--batch_size", "50", "--s_qo", "9", "--s_kv", "30", "--causal", "--random_actual_seq_len")
    assert max(w.qo_lens) <= 9
    assert max(w.kv_lens) <= 30
    assert len(set(w.kv_lens)) > 5
    assert all(qo <= kv for qo, kv in zip(w.qo_lens, w.kv_lens, strict=True))
    (again,) = asked(PAGED, "--batch_size", "50", "--s_qo", "9", "--s_kv", "30", "--causal", "--random_actual_seq_len")
    assert again == w


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ((RAGGED, "--head_dim_vo", "64", "--batch_size", "2"), "--head_dim_vo"),
        ((RAGGED, "--window_left", "9"), "--causal"),
        ((DECODE, "--s_kv", "0"), "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: tuple[str, ...], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        asked(*argv)


def test_without_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.cute_attn, "__file__", str(tmp_path / "cute_attn/__init__.py"))
    with pytest.raises(ArtifactError, match="not a checkout"):
        cli.run(argparse.Namespace(rest=[]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message on a machine without a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys, ["bench", "--routine", DECODE, "--batch_size", "1", "2"], 2)
    assert "No GPU to measure on" in told
    assert "2 rows would have been" in told
    assert "must end in .json, .csv, .png" in printed(capsys, ["bench", "--output_path", "speeds.txt"], 2)


def test_outputs_have_the_numbers(tmp_path: Path) -> None:
    fakes = {"cute_attn": 0.5, "cute_attn xqa function": 0.5, "FlashInfer fa2": 0.75, "FlashInfer XQA": ABSENT}
    row = row_of_fakes(one_request(1, 64, 4, 2, 64, 64, dtype="float16"), fakes)
    ours = row["candidates"]["cute_attn"]
    record = {**record_of({**row, "section": "bench"}), "summary": {"bench": bench.summary([row])}}
    text = command.text(record)
    assert "FlashInfer XQA: UnavailableError: it is not installed" in text
    head, _, line = text.split("\n\n")[2].splitlines()
    assert line.split()[-3:] == ["fa2)", f"{ours['error']:.1e}", "1755"]
    assert line.index(")") + 1 == head.index("cute_attn") + len("cute_attn"), "columns are aligned"
    for name in ("a.json", "a.csv", "a.png"):
        command.write(record, tmp_path / name, "tag", DECODE)
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["ratio"] == row["ratio"]
    with (tmp_path / "a.csv").open() as file:
        own, *_, peer = csv.DictReader(file)
    assert (own["routine"], own["case_tag"], own["median_ms"]) == (DECODE, "tag", "0.5")
    assert float(own["gb_per_s"]) == pytest.approx(ours["speed"], abs=0.1)
    assert (peer["backend"], peer["gb_per_s"]) == ("FlashInfer XQA", "")
    assert "not installed" in peer["reason"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_fresh_process_times_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch and the import, nothing else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(coldstart.measure("cute_attn")) == ["torch_s", "import_s"]


class Processes:
    """Stands for the fresh processes of `perf.coldstart`: cold ones take 9, 3, 1 and 2 s, others are broken."""

    def __init__(self) -> None:
        self.seconds = iter((9.0, 3.0, 1.0, 2.0))  # the first process writes byte code and does not count
        self.started: list[tuple[str, str]] = []

    def __call__(self, module: str, library: str, env: dict[str, str], limit: float, lines: int) -> dict[str, Any]:
        assert (module, library, lines) == ("coldstart", "cute_attn", 1)
        kind = "cold" if coldstart.BUNDLE in env else "later"
        self.started.append((env["CUTE_ATTN_CACHE_DIR"], kind))
        assert env["PYTHONPYCACHEPREFIX"]
        assert not env["PYTHONDONTWRITEBYTECODE"]
        return {"import_s": 0.5, "prefill_s": next(self.seconds)} if kind == "cold" else {"reason": "broken"}


def test_cold_starts_are_medians_or_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    monkeypatch.setattr(program, "in_process", processes)
    saved: list[dict[str, Any]] = []
    coldstart.measured("cute_attn", 3, coldstart.Run(1.0), saved.append)
    assert saved[0] == {"cute_attn, cold": {"import_s": 0.5, "prefill_s": 3.0, "processes": 1}}
    found: dict[str, Any] = {}
    for part in saved:
        found |= part
    assert found["cute_attn, cold"] == {"import_s": 0.5, "prefill_s": 2.0, "processes": 3}
    assert found["cute_attn, warm"] == {"reason": "broken"}
    kinds = [kind for _, kind in processes.started]
    assert (kinds.count("cold"), kinds.count("later")) == (1 + 3, 2), "no failure is repeated"
    cold = {cache for cache, kind in processes.started if kind == "cold"}
    assert len(cold) == 1 + 3, "every cold process has an empty cache"


def test_cold_starts_end_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fourth process on, nothing is known: the first round's medians stay, other conditions say why."""
    times = iter(range(100))
    monkeypatch.setattr(program, "in_process", Processes())
    found: dict[str, Any] = {}
    run = coldstart.Run(600.0, budget=4.0, clock=lambda: next(times))
    coldstart.measured("cute_attn", 3, run, found.update)
    assert found["cute_attn, cold"] == {"import_s": 0.5, "prefill_s": 3.0, "processes": 1}
    assert found["cute_attn, bundle"] == {"reason": coldstart.SPENT}


def test_an_absent_library_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coldstart.MODULES, "FlashInfer", "no_such_module")
    monkeypatch.setattr(program, "in_process", None)
    found: list[dict[str, Any]] = []
    coldstart.measured("FlashInfer", 1, coldstart.Run(1.0), found.append)
    assert found == [{"FlashInfer": {"reason": "no_such_module is not installed"}}]


def test_sizes_of_installs() -> None:
    found = coldstart.install_sizes()
    on_disk = sum(path.stat().st_size for path in (ROOT / "cute_attn").rglob("*.py"))
    assert found["cute_attn"]["bytes"] == on_disk
    assert found["cute_attn with the compiler"]["bytes"] > on_disk


def test_records_name_the_machine() -> None:
    env = machine.environment()
    assert {"gpu", "host", "torch", "date", "commit"} <= env.keys()
    assert all(isinstance(value, str) for value in env.values())
