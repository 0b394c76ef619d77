"""docs/observability.md has the table of variables that the library has."""

from __future__ import annotations

from cute_attn.runtime import switches
from tests.support.subprocesses import ROOT


def test_the_table_of_variables_is_the_documented_one() -> None:
    assert switches.markdown() in (ROOT / "docs/observability.md").read_text()
