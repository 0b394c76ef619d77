"""Every block of Python in the documents runs as it stands, on the CPU, and prints what its comments say.

A comment before a block may say that it goes on where the block before ended (`<!-- continues -->`), needs a GPU
(`<!-- needs a GPU -->`: it is run where there is one, compiled elsewhere), or why it is only compiled
(`<!-- compile only: REASON -->`).
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch

from tests.docs.pages import Block, blocks

BLOCKS = blocks("python")
PRINTED = re.compile(r"^ *print\(.*\)  # (?P<text>\S.*)$", re.M)
NOTES = re.compile(r"continues|needs a GPU|compile only: .{10,}")


def before(block: Block) -> list[Block]:
    """Return the blocks that a block continues, first one first."""
    if block.note != "continues":
        return []
    earlier = [other for other in BLOCKS if other.path == block.path and other.line < block.line]
    previous = max(earlier, key=lambda other: other.line)
    return [*before(previous), previous]


def test_notes_are_known() -> None:
    assert not [block.name for block in BLOCKS if block.note and not NOTES.fullmatch(block.note)]


def test_there_are_blocks_in_the_readme() -> None:
    assert len([block for block in BLOCKS if block.path.name == "README.md"]) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block(block: Block) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(block.path), "exec")
    if block.note.startswith("compile only") or (block.note == "needs a GPU" and not torch.cuda.is_available()):
        return
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "block"}
    for other in before(block):
        exec(compile(other.text, str(other.path), "exec"), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    assert printed.getvalue(), "a block prints a result"
    expected, lines = PRINTED.findall(block.text), printed.getvalue().splitlines()
    if len(expected) == len(lines) or block.path.name == "README.md":  # else it prints more than comments can say
        assert lines == expected
