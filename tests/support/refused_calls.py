"""Good calls of entries that one change makes wrong: the error, every time, before anything is written."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_attn import ArgumentError
from perf.pretended_gpu import NullDriver
from tests.support.entry_points import Call, Entry
from tests.support.launch_corpus import pretended

Row = tuple[Any, ...]  # what changes, a regular expression of the message, and the error if no ArgumentError
EQUAL = (1, 1.0, True, 0, 0.0, False, -1, -1.0)


def same(rule: str, *error: type[Exception], **wrong: Any) -> list[Row]:
    """Rows of arguments under one rule, which the message tells; `wrong`: a value of each, or a list of them."""
    pairs = [(name, x) for name, given in wrong.items() for x in (given if isinstance(given, list) else [given])]
    shown = ["" if isinstance(x, torch.Tensor) else f".*{re.escape(str(x))}" for _, x in pairs]
    return [({name: x}, rf"\b{name} {rule}{text}", *error) for (name, x), text in zip(pairs, shown, strict=True)]


def raises(row: Row) -> Any:
    _, message, *error = row
    return pytest.raises(error[0] if error else ArgumentError, match=f"(?s){message}")


def equal_options(changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Options that equal the wrong ones, but for their type."""
    for name, value in changes.items():
        if isinstance(value, int | float):
            yield from ({name: equal} for equal in EQUAL if equal == value and type(equal) is not type(value))


def assert_refused(call: Call, entry: Entry, row: Row) -> None:
    """The same in the first call and after good ones, among them those whose options equal the wrong ones."""
    given, errors = entry.tensors | {name: entry.tensors[name].clone() for name in entry.written}, []
    written = [given[name].view(torch.uint8) for name in entry.written]
    for _ in range(2):
        for x in written:
            x.fill_(7)
        with raises(row) as raised:
            call({**given, **row[0]})
        errors.append((raised.type, str(raised.value)))
        assert all((x == 7).all() for x in written)
        for _ in range(2):  # the second may be a replay
            call(given)
            for options in equal_options(row[0]):
                with contextlib.suppress(ValueError):
                    call({**given, **options})
    assert errors[0] == errors[1]


def places(row: Row) -> list[contextlib.AbstractContextManager[None]]:
    """The reference and, where no values of tensors are wrong and no device is refused, a pretended GPU."""
    of_tensors = any(isinstance(x, torch.Tensor | tuple | list) for x in row[0].values())
    return [contextlib.nullcontext(), *([] if of_tensors or "cpu" in row[1] else [pretended(NullDriver())])]
