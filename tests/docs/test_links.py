"""Every relative link of the documents leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, links, pages

ELSEWHERE = re.compile(r"^(https?|mailto):")
VARIABLE = re.compile(r"\bCUTE_ATTN_[A-Z_]+\b")
NAMES = [path.relative_to(ROOT).as_posix() for path in pages()]


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str) -> None:
    path = ROOT / name
    broken = []
    for line, target in links(path):
        if ELSEWHERE.match(target):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        if not to.exists() or not to.is_relative_to(ROOT) or (anchor and anchor not in anchors(to)):
            broken.append(f"{name}:{line}: {target}")
    assert not broken


def test_every_page_is_reached_from_the_readme() -> None:
    """Follow all links from README.md: a document that nothing leads to is never read."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        path = todo.pop()
        if path in seen or path.suffix != ".md" or not path.exists():  # missing ones: test_links
            continue
        seen.add(path)
        targets = (target.partition("#")[0] for _, target in links(path) if not ELSEWHERE.match(target))
        linked = [(path.parent / target).resolve() for target in targets if target]
        todo += [to / "README.md" if to.is_dir() else to for to in linked]  # as GitHub shows a folder
    missed = {path for path in pages() if path not in seen} - {ROOT / "AGENTS.md", ROOT / "CHANGELOG.md"}
    missed = {path for path in missed if "api" not in path.relative_to(ROOT).parts}  # the site's pages of docstrings
    assert not missed, sorted(path.relative_to(ROOT).as_posix() for path in missed)


def test_environment_variables_exist() -> None:
    sources = [path for folder in ("cute_attn", "tests", "perf") for path in (ROOT / folder).rglob("*.py")]
    known = {name for path in sources if path != Path(__file__) for name in VARIABLE.findall(path.read_text())}
    named = {name: path.name for path in pages() for name in VARIABLE.findall(path.read_text())}
    assert not {name: page for name, page in named.items() if name.rstrip("_") not in known}


def test_nothing_of_the_documents_is_ignored_by_git() -> None:
    command = ["git", "-C", str(ROOT), "check-ignore", *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 128), done.stdout  # 1: none; 128: no repository
