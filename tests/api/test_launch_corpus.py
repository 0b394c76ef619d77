"""What calls pass to the driver is what it was when the corpus was recorded: `tests.support.launch_corpus`."""

from __future__ import annotations

import pytest

from tests.support.launch_corpus import recorded, stored
from tests.support.launch_sequences import SEQUENCES

CORPUS = stored()


def test_the_corpus_holds_these_sequences() -> None:
    assert CORPUS.keys() == SEQUENCES.keys()


@pytest.mark.parametrize("name", SEQUENCES)
def test_launches_are_those_of_the_corpus(name: str) -> None:
    assert recorded(SEQUENCES[name]) == CORPUS[name]
