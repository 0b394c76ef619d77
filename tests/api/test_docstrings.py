"""Docstrings of the public functions and methods: numpydoc sections, and every parameter of the signature named."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import cute_attn
import cute_attn.xqa

SECTIONS = ("Parameters", "Returns", "Raises", "Examples")
REFERENCE = re.compile(r"`([A-Za-z_][\w.]*)`")


def public_callables() -> dict[str, Callable[..., Any]]:
    """Functions, classes (which stand for their constructors) and the methods that classes add, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for module in (cute_attn, cute_attn.xqa):
        for name in module.__all__:
            member = getattr(module, name)
            if not inspect.isclass(member):
                found[name] = member
            elif not issubclass(member, Exception | tuple):
                found[name] = member
                methods = inspect.getmembers(member, inspect.isfunction)
                found |= {f"{name}.{method}": f for method, f in methods if not method.startswith("_")}
    return found


CALLABLES = public_callables()


def sections(text: str) -> dict[str, str]:
    """Sections of a docstring by their titles; "" is the text before the first."""
    parts = re.split(rf"^({'|'.join(SECTIONS)})\n-+$", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def parameters(member: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(member).parameters if name != "self"]


def named(text: str) -> set[str]:
    """Names on the left of " : " in a Parameters section."""
    one_line = re.sub(r",\n *", ", ", text)  # long lists of names
    entries = re.findall(r"^(\S.*?) :(?: |$)", one_line, flags=re.MULTILINE)
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


def test_there_is_something_to_check() -> None:
    assert len(CALLABLES) > 40


@pytest.mark.parametrize("name", CALLABLES)
def test_parameters_are_named(name: str) -> None:
    member = CALLABLES[name]
    found = sections(inspect.getdoc(member) or "")
    missing = set(parameters(member)) - named(found.get("Parameters", ""))
    assert not missing, f"not in Parameters: {sorted(missing)}"


@pytest.mark.parametrize("name", CALLABLES)
def test_sections(name: str) -> None:
    member = CALLABLES[name]
    found = sections(inspect.getdoc(member) or "")
    assert found[""].strip()
    if parameters(member):
        assert "Parameters" in found
        assert "Raises" in found
    if not inspect.isclass(member) and inspect.signature(member).return_annotation not in ("None", None):
        assert "Returns" in found


@pytest.mark.parametrize("name", CALLABLES)
def test_references_exist(name: str) -> None:
    """Methods that a docstring refers to exist."""
    text = inspect.getdoc(CALLABLES[name]) or ""
    for reference in REFERENCE.findall(text):
        owner, _, method = reference.partition(".")
        if owner in cute_attn.__all__ and method:
            assert hasattr(getattr(cute_attn, owner), method), reference
