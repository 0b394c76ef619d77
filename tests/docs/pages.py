"""What the tests of documents read of Markdown: blocks of code, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)\s*$")
COMMENT = re.compile(r"^\s*<!-- (?P<text>.*) -->\s*$")
HEADING = re.compile(r"^#{1,6} +(?P<text>.+?)\s*$")
LINK = re.compile(r'\]\((?P<markdown>[^)\s]+)\)|(?:src|srcset|href)="(?P<html>[^"]+)"')
CODE = re.compile(r"(`+).+?\1")


@dataclass(frozen=True)
class Block:
    """A block of code. `note`: the HTML comment on the line before it, "" if there is none."""

    path: Path
    line: int  # of its first line of code, from 1
    language: str
    note: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}"


def pages() -> list[Path]:
    """Return all documents that readers are sent to."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]


def split(path: Path) -> tuple[list[Block], list[tuple[int, str]]]:
    """Return the blocks of code of a page, and its other lines with their numbers."""
    blocks, prose = [], []
    lines = iter(enumerate(path.read_text().splitlines(), 1))
    before = ""
    for number, line in lines:
        if fence := FENCE.match(line):
            closing = re.compile(rf"^ *{fence['ticks']}\s*$")
            code: list[str] = []
            for _, inner in lines:
                if closing.match(inner):
                    break
                code.append(inner.removeprefix(fence["indent"]))
            note = COMMENT.match(before)
            blocks.append(Block(path, number + 1, fence["language"], note["text"] if note else "", "\n".join(code)))
            before = ""
        else:
            prose.append((number, line))
            before = line
    return blocks, prose


def blocks(language: str) -> list[Block]:
    """Return the blocks of one language of all documents."""
    return [block for path in pages() for block in split(path)[0] if block.language == language]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them (the site is told to make the same)."""
    found: set[str] = set()
    for _, line in split(path)[1]:
        if heading := HEADING.match(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"]).replace("`", "").lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            repeated = sum(name == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", name) is not None for name in found)
            found.add(f"{slug}-{repeated}" if repeated else slug)
    return found


def links(path: Path) -> Iterator[tuple[int, str]]:
    """Return the targets of a page's links and pictures, with their lines; none of those in code."""
    for number, line in split(path)[1]:
        for match in LINK.finditer(CODE.sub("", line)):
            yield number, match["markdown"] or match["html"]
