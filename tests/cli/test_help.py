"""`--help` of every program of `perf` and of every command of `python -m cute_attn`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from cute_attn.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "perf").rglob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("module", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*")
def test_programs_of_perf(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {module} ")


@pytest.mark.parametrize("command", ["", *(module.__name__.rpartition(".")[2] for module in COMMANDS)])
def test_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*filter(None, [command]), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m cute_attn {command}".rstrip())
