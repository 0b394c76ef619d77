"""Every relative link of the documents leads to a file, and every anchor to a heading; files define what they say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, links, pages
from tests.test_style import FILES

ELSEWHERE = re.compile(r"^(https?|mailto):")
VARIABLE = re.compile(r"\bCUTE_ATTN_[A-Z_]+\b")
IN_FILE = re.compile(r"`(\w+)` in `([\w/.]+\.py)`")
NAMES = [path.relative_to(ROOT).as_posix() for path in pages()]


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str) -> None:
    path = ROOT / name

    def leads(target: str) -> bool:
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        return to.exists() and to.is_relative_to(ROOT) and (not anchor or anchor in anchors(to))

    assert not [f"{name}:{line}: {to}" for line, to in links(path) if not ELSEWHERE.match(to) and not leads(to)]


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
    missed = {path.relative_to(ROOT).as_posix() for path in pages() if path not in seen}
    assert {name for name in missed if not name.startswith("docs/api/")} <= {"AGENTS.md", "CHANGELOG.md"}


def test_environment_variables_exist() -> None:
    known = {name for path in FILES if path != Path(__file__) for name in VARIABLE.findall(path.read_text())}
    named = {name: path.name for path in pages() for name in VARIABLE.findall(path.read_text())}
    assert not {name: page for name, page in named.items() if name.rstrip("_") not in known}


def test_files_define_what_documents_say_is_in_them() -> None:
    for name, file in {found for page in pages() for found in IN_FILE.findall(page.read_text())}:
        texts = (path.read_text() for path in FILES if path.as_posix().endswith(f"/{file}"))
        definition = re.compile(rf"^\s*(?:(?:def|class) {name}\b|{name}\b[^=\n]* = )", re.M)
        assert any(map(definition.search, texts)), f"{name} in {file}"


def test_nothing_of_the_documents_is_ignored_by_git() -> None:
    done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", *NAMES], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 128), done.stdout  # 1: none; 128: no repository
