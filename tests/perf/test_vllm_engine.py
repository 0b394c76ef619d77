"""`perf.vllm_engine` without vLLM: a package of its name with the two classes that the program uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import program, report, vllm_engine

ENGINE = """
import time


class SamplingParams:
    def __init__(self, max_tokens, **_):
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, attention_backend, **options):
        if attention_backend == "BROKEN":
            raise ValueError("no such backend")
        assert options["load_format"] == "dummy"

    def generate(self, prompts, sampling, use_tqdm):
        assert all(len(p["prompt_token_ids"]) in (128, 2048, 4096) for p in prompts)
        time.sleep(1e-4 * sampling.max_tokens)  # more tokens take longer, however busy the machine
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(ENGINE)
    root = Path(vllm_engine.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{tmp_path}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(program, "gpu", lambda package: None)


def test_every_engine_is_measured_or_says_why_not(
    vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    argv = ["--modes", "eager", "--backends", "CUTE_ATTN", "BROKEN", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["vllm_engine", *argv])
    vllm_engine.main()
    rows = json.loads(out.read_text())["vllm_engine"]
    assert [row["backend"] for row in rows] == ["CUTE_ATTN", "BROKEN", "BROKEN", "CUTE_ATTN"]
    assert all(len(rows[i][column]) == 3 for i in (0, 3) for column in report.ENGINE_COLUMNS)
    assert "no such backend" in rows[1]["reason"]
    assert "| eager, decode |" in capsys.readouterr().out


def test_the_table_has_the_fastest_of_all_processes() -> None:
    def row(backend: str, *speeds: float) -> program.Row:
        return {"mode": "eager", "backend": backend, **{column: [*speeds] for column in report.ENGINE_COLUMNS}}

    rows = [row("B", 100.0, 90.0), row("CUTE_ATTN", 80.0), row("CUTE_ATTN", 110.0, 70.0), row("C", 50.0)]
    rows.append({"mode": "eager", "backend": "D", "reason": "none"})
    lines = report.engine_tables({"vllm_engine": rows})[0].splitlines()
    assert lines[0] == "| tokens/s | CUTE_ATTN | B | C | D | CUTE_ATTN to the best other |"
    assert lines[2] == "| eager, prefill | 110 | 100 | 50 | - | 1.10 |"
    assert len(lines) == 5
    without_ours = report.engine_tables({"vllm_engine": [rows[0], rows[3]]})[0]
    assert "| eager, prefill | 100 | 50 | - |" in without_ours
