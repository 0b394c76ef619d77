"""Notes which calls of a function are made, without a change of what they do."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest


class Noted(NamedTuple):
    """Arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Noted]:
    """Replace a function of a module, or a method of a class, by one that adds its calls to the list returned."""
    calls: list[Noted] = []
    function = getattr(owner, name)

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(Noted(args, kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, note)
    return calls
