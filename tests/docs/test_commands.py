"""Every command of the documents exists: modules with these options, targets, extras, files and test markers."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cute_attn.cli import main
from perf import command
from tests.docs.pages import ROOT, blocks

ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
REAL = ("explain", "support", "doctor")  # of `python -m cute_attn`: cheap, so they are run
# What the source of a program has that parses its arguments before it does anything.
STARTS = re.compile(r"^(import argparse|from cute_attn\.cli import main)", re.M)
UNCHECKED = ("docker", "vllm", "git", "compute-sanitizer", "torchrun")
PROJECT = (ROOT / "pyproject.toml").read_text()
OPTIONAL = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
EXTRAS = set(re.findall(r"^(\w+) = \[", OPTIONAL, re.M))
MARKERS = set(re.findall(r'^  "(\w+): ', PROJECT.partition("\nmarkers = [")[2], re.M))


class Command(NamedTuple):
    """One line of a block of shell, without assignments of variables in front."""

    place: str
    words: list[str]


class Parsed(Exception):
    """Raised where a program has parsed its arguments and would start."""


def commands() -> list[Command]:
    found = []
    for block in (*blocks("bash"), *blocks("")):
        if block.path.name == "AGENTS.md":
            continue  # its lines stand for several commands
        lines = block.text.replace("\\\n", " ").splitlines()
        for offset, line in enumerate(lines):
            # Two spaces separate a command from its explanation in tables of commands.
            words = shlex.split(re.split(r"\s{3,}", line.strip())[0], comments=True) if plain(line) else []
            while words and ASSIGNMENT.fullmatch(words[0]):
                words = words[1:]
            known = words and (block.language == "bash" or words[0] in CHECKS)
            if known and " | " not in line:
                found.append(Command(f"{block.path.relative_to(ROOT)}:{block.line + offset}", words))
    return found


def plain(line: str) -> bool:
    """Tell whether a line has the quotes of a shell, not apostrophes of prose."""
    try:
        return bool(shlex.split(line, comments=True))
    except ValueError:
        return False


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {word for word in words[1:] if not ASSIGNMENT.match(word) and word != "|"} <= targets


def check_pip(words: list[str]) -> None:
    groups = [group for word in words for group in re.findall(r"^(?:\.|cute_attn)\[(.+)\]", word)]
    assert {extra for group in groups for extra in group.split(",")} <= EXTRAS


def check_pytest(words: list[str]) -> None:
    chosen = words[words.index("-m") + 1] if "-m" in words else ""
    assert set(re.findall(r"[a-z0-9]+", chosen)) - {"and", "or", "not"} <= MARKERS
    assert all((ROOT / word.partition("::")[0]).exists() for word in words if word.startswith("tests"))


def check_python(words: list[str]) -> None:
    """Let a program parse these arguments, and stop it before it does anything; run what is cheap."""
    if words[1] == "-m" and words[2] == "pytest":
        check_pytest(words[2:])
    elif words[1:3] == ["-m", "cute_attn"] and words[3] in REAL:
        assert main(words[3:]) == 0
    elif words[1:4] == ["-m", "cute_attn", "bench"]:
        command.parse(words[4:])
    elif words[1] == "-m" and words[2].split(".")[0] in ("cute_attn", "perf", "tests", "examples"):
        parse(words[2], words[3:])
    elif words[1] != "-m":
        assert (ROOT / words[1]).exists()


def parse(module: str, arguments: list[str]) -> None:
    """Let a module parse its arguments. One without a parser would start: that it exists is all that is checked."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None, f"there is no module {module}"
    if not STARTS.search(Path(spec.origin or "").read_text()):
        return
    parse_known = argparse.ArgumentParser.parse_known_args
    depth = 0  # a parser of commands calls those of its commands

    def stop(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> tuple[Any, list[str]]:
        nonlocal depth
        depth += 1
        found, unknown = parse_known(parser, *given, **named)
        depth -= 1
        if depth:
            return found, unknown
        assert not unknown, f"{module} has no {unknown}"
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__")


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    **dict.fromkeys(UNCHECKED, lambda words: None),
}
COMMANDS = commands()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.place} {' '.join(c.words)[:60]}")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*")
def test_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.words[0] in CHECKS, command
    CHECKS[command.words[0]](command.words)


def test_the_readme_has_the_two_commands() -> None:
    assert [c.words for c in COMMANDS if c.place.startswith("README")][:2] == [["make", "demo"], ["make", "test"]]


def test_the_dockerfile_uses_what_exists() -> None:
    text = Path(ROOT / "examples/Dockerfile").read_text()
    assert set(re.findall(r"\.\[(\w+)\]", text)) <= EXTRAS
    (line,) = re.findall(r"python -m (cute_attn bundle .*)", text)
    for name, default in re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE):
        line = line.replace(f"${name}", default)
    parse("cute_attn", shlex.split(line)[1:])


@pytest.mark.parametrize(
    ("module", "argument", "message"),
    [("tests.gpu.sanitize", "fa9", "no problem is named 'fa9'"), ("tests.docs.generated", "--check", "unrecognized")],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*")
def test_unknown_arguments_are_refused(
    module: str, argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, argument])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module(module, run_name="__main__")
    assert message in capsys.readouterr().err
