"""Tiles that `perf.search --rows` tries, on a CPU: what is planned, what a run hands on, what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cute_attn.kernels.blocks.tiles import LONGEST_TOKENS, Launch
from cute_attn.kernels.fa3.host.family import KERNELS
from cute_attn.kernels.fa3.smem import HopperMemory
from cute_attn.kernels.host.persistent.batch import tiling
from perf import sections, tile_trials
from perf.sections import Section
from perf.tile_trials import ROWS, Row, Trial, tile
from tests.support.backend_problems import build
from tests.support.batch_case import dims, heads, ragged

EVERY = [row for rows in ROWS.values() for row in rows]


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.workload.name)
def test_rows_try_tiles_that_fit_under_names_of_their_own(row: Row) -> None:
    """Kernels that spill are found when they are compiled, and reported."""
    assert list(tile_trials.trials(row.workload)) == [trial.name for trial in row.trials]
    assert len({trial.name for trial in row.trials}) == len(row.trials) > 2
    for trial in row.trials:
        if trial.tile:
            spec = tile_trials.spec(row.workload, trial.tile)
            assert tile_trials.fits(trial.tile, HopperMemory.of(spec).bytes)


def test_ctas_that_do_not_fit_an_sm_together() -> None:
    assert tile_trials.fits(tile(64, 64, 3, 2, 3), 75 << 10)
    assert not tile_trials.fits(tile(64, 64, 3, 2, 3), (75 << 10) + 1)
    assert not tile_trials.fits(tile(128, 64, 3, 2), (227 << 10) + 1)


def test_plans_take_a_trial() -> None:
    settings = build(ragged((70,), (90,), mask="causal", window_left=40, **heads(8, 1), **dims(64))).problem.settings

    def planned() -> tuple[Any, int, int]:
        found = tiling(KERNELS, settings, 64, 1 << 20, "sm_90a", 132)
        return found.tile, found.params.num_kv_heads, found.params.l2_kv_tokens

    own = planned()
    narrow = tile(128, 48, 4, 2, 2, from_first_key=True)
    with tile_trials.force(Trial(narrow, packed=True, section_mib=8)):
        assert planned() == (narrow, 1, own[2] // 4)
    with tile_trials.force(Trial(packed=False)):
        assert planned() == (own[0], 8, own[2])
    assert planned() == own


def test_plans_leave_the_last_wave_whole() -> None:
    settings = build(ragged((70,), (90,), **heads(8, 8), **dims(128))).problem.settings

    def cuts() -> bool:
        return tiling(KERNELS, settings, 64, 1 << 20, "sm_90a", 132, Launch(LONGEST_TOKENS)).params.cuts_last_wave

    assert cuts()
    with tile_trials.force(Trial(cuts_last_wave=False)):
        assert not cuts()
    assert cuts()


def test_a_run_measures_the_trials_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside "auto" and the peers, within what compiling leaves of the budget; the fastest is printed first."""
    compiled: list[Row] = []
    slow, fast = (trial.name for trial in ROWS["gpt-oss"][0].trials[:2])

    def run(program: str, own: dict[str, Section], options: Any) -> dict[str, Any]:
        assert (program, list(own)) == ("search", ["gpt-oss"])
        assert 0 < options.budget <= 60
        (w,) = own["gpt-oss"].workloads
        assert own["gpt-oss"].more
        assert {slow, fast} <= set(own["gpt-oss"].more(w))
        speeds = {"cute_attn": 174.0, slow: 150.0, fast: 208.8, "flash-attn-4": 124.0}
        entries: dict[str, Any] = {name: {"speed": speed} for name, speed in speeds.items()}
        entries["torch cuDNN"] = {"reason": "no windows"}
        row = {"name": w.name, "unit": "TFLOP/s", "sm_clock_mhz": 1800, "best_peer": "flash-attn-4"}
        return {"rows": [{**row, "candidates": entries}], "failed_rows": {"d256: x": "out of memory"}}

    monkeypatch.setattr(tile_trials, "why_no_gpu", lambda: None)
    monkeypatch.setattr(tile_trials, "compile_all", lambda rows: compiled.extend(rows))
    monkeypatch.setattr(sections, "run", run)
    assert tile_trials.main(["--rows", "gpt-oss", "--budget", "60", "--out", str(tmp_path / "x.json")]) == 0
    assert compiled == list(ROWS["gpt-oss"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == f"208.8 1.200 of auto 1.684 of the best peer {fast}".split()
    assert [line.split()[0] for line in lines[2:5]] == ["174.0", "150.0", "124.0"]
    assert lines[5:] == ["        -  torch cuDNN: no windows", "d256: x: out of memory"]


def test_sections_measure_further_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bound with those that every row has."""
    w, seen = EVERY[0].workload, []

    def measured(record: Any, section: str, w: Any, binds: dict[str, Any], rounds: int) -> None:
        seen.extend(binds)

    for name, value in {
        "compile_ours": lambda jobs, meanwhile: None,
        "ceilings": lambda *a: {},
        "environment": dict,
        "_measured": measured,
    }.items():
        monkeypatch.setattr(sections, name, value)
    monkeypatch.setattr(sections.torch.cuda, "current_device", lambda: 0)
    options = tile_trials.parse(["--rows", "all", "--peers", "flash-attn-4"])
    sections.run("search", {"x": Section([w], more=tile_trials.trials)}, options)
    assert seen == ["cute_attn", "cute_attn host lengths", "flash-attn-4", *tile_trials.trials(w)]
