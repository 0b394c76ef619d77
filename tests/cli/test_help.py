"""`--help` of every program of `perf` and of every command of `python -m cute_attn`."""

from __future__ import annotations

import functools
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


@pytest.mark.parametrize("command", ["", *(module.__name__.rpartition(".")[2] for module in COMMANDS), *PROGRAMS])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*")
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    program = functools.partial(runpy.run_module, command, run_name="__main__")
    run = program if command in PROGRAMS else functools.partial(main, [*filter(None, [command]), "--help"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    usage = command if command in PROGRAMS else f"cute_attn {command}".rstrip()
    assert capsys.readouterr().out.startswith(f"usage: python -m {usage}")
