"""Errors of functions that call others name arguments as their own callers gave them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from cute_attn.errors import ArgumentError, ArgumentTypeError

_WORDS = ("q", "k", "v", "out", "query", "mask")  # may stand for something else inside of a message, except behind:
_BEFORE_NAMES = (" share memory with ", ", the rows of ")


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Return a context whose errors have other names, or beginnings: `rename`."""
    try:
        yield
    except (ArgumentError, ArgumentTypeError) as error:
        rename(error, names)
        raise


def rename(error: ArgumentError | ArgumentTypeError, names: Mapping[str, str]) -> None:
    """Replace names, or beginnings of messages, in an error that is on its way to the caller."""

    def new(found: re.Match[str]) -> str:
        before = found.string[: found.start()]
        is_word = before and found[0] in _WORDS and not before.endswith(_BEFORE_NAMES)
        return found[0] if is_word else names[found[0]]

    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    error.args = (re.sub(rf"(?<![\w.])(?:{longest_first})(?!\w)", new, str(error)),)
