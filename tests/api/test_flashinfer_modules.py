"""FlashInfer 0.7.2's modules attention, cascade, sparse, page and quantization: names, arguments, defaults."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import cute_attn
from cute_attn.errors import NotSupported
from tests.support.flashinfer_names import ABSENT, REFUSED, SIGNATURES


def member(path: str) -> Any:
    """What `module:name` or `module:Class.method` names in our package."""
    module, _, name = path.partition(":")
    found = importlib.import_module(f"cute_attn.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_and_defaults(path: str) -> None:
    """FlashInfer's arguments come first, in its order and with its defaults; ours may add keyword-only ones."""
    found = member(path)
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    shared = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [_shown(p) for p in shared] == SIGNATURES[path].split()
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def _shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return parameter.name if default is parameter.empty else f"{parameter.name}={default!r}"


@pytest.mark.parametrize("path", [path for path in SIGNATURES if "." not in path])
def test_the_top_level_holds_the_same(path: str) -> None:
    assert getattr(cute_attn, path.partition(":")[2]) is member(path)


@pytest.mark.parametrize("path", REFUSED)
def test_refused_names_say_why(path: str) -> None:
    with pytest.raises(NotSupported, match=f"refuses {path.partition(':')[2]}: .* Instead: "):
        member(path)(None)


@pytest.mark.parametrize("path", ABSENT)
def test_what_is_out_of_scope_is_absent(path: str) -> None:
    """A name that appears must move to the table of signatures."""
    module, _, name = path.partition(":")
    assert not hasattr(importlib.import_module(f"cute_attn.{module}"), name)
