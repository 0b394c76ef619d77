"""Commands of `python -m cute_attn` in this process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cute_attn.cli import main


def printed(capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int = 0) -> str:
    """What a command prints that ends with `code`: on stderr from 2 on, of invalid arguments or an interruption."""
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.err if code >= 2 else captured.out
