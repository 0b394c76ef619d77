"""Extension of griffe: writes the docstrings of this library as Markdown.

Sections have the form of numpy's docstrings, but what follows the colon of a parameter is prose, not a type: it becomes
a list. Examples become code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

SECTION = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n-{3,}\n", re.M)
ENTRY = re.compile(r"^(?P<names>[A-Za-z_*][\w *,()`]*?) : (?P<text>.*)$")


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object has been read. One that a decorator completes is asked for."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            completed = obj.is_function and any(str(each.value) == "older_form" for each in obj.decorators)
            text = griffe.dynamic_import(obj.path).__doc__ if completed else obj.docstring.value
            obj.docstring.value = markdown(text)


def markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    head, *parts = SECTION.split(inspect.cleandoc(text))
    pieces = [literal_blocks(head)]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        pieces.append(f"**{title}**\n\n{section(title, body)}")
    return "\n\n".join(piece.strip("\n") for piece in pieces)


def section(title: str, body: str) -> str:
    """Return the body of a section."""
    if title == "Examples":
        return f"```python\n{body.strip()}\n```"
    return "\n".join(entries(body.strip("\n").splitlines()))


def entries(lines: list[str]) -> Iterator[str]:
    """Turn `names : text`, whose text may go on in indented lines, into items of a list; keep other lines."""
    in_item = False
    for line in lines:
        if match := ENTRY.match(line):
            names = ", ".join(f"`{name.strip()}`" for name in match["names"].replace("`", "").split(","))
            yield f"- {names}: {match['text']}"
            in_item = True
        elif in_item and line.startswith(" "):
            yield f"  {line.strip()}"
        else:
            in_item = False
            yield line


def literal_blocks(text: str) -> str:
    """Turn `text::` before an indented block into `text:`; Markdown shows the block as code."""
    return re.sub(r"::\n\n(?= )", ":\n\n", text)
