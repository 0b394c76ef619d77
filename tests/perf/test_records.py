"""The committed records of measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import report

RECORDS = sorted((Path(__file__).parents[2] / "perf/results").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_reports_show_every_record(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(path)])
    shown = capsys.readouterr().out
    assert json.loads(path.read_text())["environment"]["date"] in shown
    assert "| --- |" in shown
