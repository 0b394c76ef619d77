"""Tables in documents are those that the records and the capability table give, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import generated
from tests.docs.pages import ROOT, pages

WITH_PARTS = [path for path in pages() if generated.named(path)]


def test_every_part_is_in_a_document() -> None:
    found = [name for path in WITH_PARTS for name in generated.named(path)]
    assert sorted(found) == sorted(generated.PARTS)


@pytest.mark.parametrize("path", WITH_PARTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_it_is_current(path: Path) -> None:
    assert generated.rewritten(text := path.read_text()) == text, "python -m tests.docs.generated writes it anew"


@pytest.mark.parametrize("path", WITH_PARTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_changed_figure_is_noticed(path: Path) -> None:
    text = path.read_text()
    changed = generated.PART.sub(lambda match: match[0].replace("\n\n", "\n\n1", 1), text)
    assert changed != text
    assert generated.rewritten(changed) == text
