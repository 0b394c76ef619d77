"""Which tokens see which, read from the mask functions that transformers builds, without making a mask of them.

transformers describes a mask by nested closures: `and_masks(sliding_window_overlay(w), causal_mask_function)`. They are
recognised by comparing their code objects with those of a template that transformers makes here, and a template counts
only where its values on a small grid are the ones that `Pattern` stands for. What is not recognised, because a model
adds something or because another release builds masks differently, is computed from the exact boolean mask.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import masking_utils

GRID = 8  # tokens of the masks that templates are tested on
SIZE = 3  # their window or chunk


class Pattern(NamedTuple):
    """Key j is seen from position i if j <= i (causal), j > i - window and j // chunk == i // chunk; 0: no limit."""

    causal: bool
    window: int = 0
    chunk: int = 0
    segment_ids: torch.Tensor | None = None  # [batch, tokens]; tokens see only those of the same number
    positions: torch.Tensor | None = None  # [batch, tokens] i and j, where they are not the tokens' places in the row
    left_padding: torch.Tensor | None = None  # [batch] the position at which chunks start


def _any(*_: Any) -> Any:
    """Stand in a template for a function that is recognised on its own; `_same` finds it under this name."""
    raise AssertionError("a placeholder is not called")


class Template(NamedTuple):
    """A mask function, and what one of the same code stands for, by what its cells hold: None if it is another mask."""

    function: Callable[..., Any]
    pattern: Callable[[dict[str, Any]], Pattern | None]


def recognise(function: Callable[..., Any]) -> Pattern | None:
    """Return the pattern of a mask function; None: it has to be evaluated."""
    if function is masking_utils.causal_mask_function:
        return Pattern(True)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(False)
    for template in _templates():
        found: dict[str, Any] = {}
        if _same(function, template.function, found) and (pattern := template.pattern(found)):
            return pattern
    return None


def _sized(kind: str, name: str, found: dict[str, Any]) -> Pattern | None:
    """Return a pattern whose field `kind` is the parameter `name`."""
    known: dict[str, Any] = {kind: found.get(name), "left_padding": found.get("left_padding")}
    return Pattern(True, **known) if isinstance(known[kind], int) else None


def _packed(local: bool, found: dict[str, Any]) -> Pattern | None:
    """Return the pattern of packed sequences around another one. `local`: positions count within a segment; else along
    the row, which moves chunks but no window.
    """
    inner, ids, positions = recognise(found["_any"]), found.get("packed_sequence_mask"), found.get("position_ids")
    if inner is None or inner.segment_ids is not None or not isinstance(ids, torch.Tensor):
        return None
    fits = isinstance(positions, torch.Tensor) if local else not inner.chunk
    return inner._replace(segment_ids=ids, positions=positions) if fits else None


def _same(value: Any, template: Any, found: dict[str, Any], name: str = "") -> bool:
    """Compare a mask function with a template by code; put what their cells hold otherwise into `found`."""
    if template is _any:
        found["_any"] = value
        return callable(value)
    if isinstance(template, tuple):
        return (
            isinstance(value, tuple)
            and len(value) == len(template)
            and all(_same(a, b, found, name) for a, b in zip(value, template, strict=True))
        )
    if not callable(template):
        found[name] = value
        return type(value) is type(template)
    code: Any = getattr(template, "__code__", None)
    if code is None or getattr(value, "__code__", None) is not code:
        return False
    cells = zip(
        getattr(code, "co_freevars", ()),
        getattr(value, "__closure__", None) or (),
        getattr(template, "__closure__", None) or (),
        strict=True,
    )
    return all(_same(cell.cell_contents, other.cell_contents, found, name) for name, cell, other in cells)


@functools.cache
def _templates() -> tuple[Template, ...]:
    make, j = masking_utils, torch.arange(GRID, device="cpu")[None]
    i, positions, ids = j.T, j % SIZE, j // SIZE  # 01201201 and 00011122
    causal = j <= i
    same_segment = causal & (ids == ids.T)

    def segments() -> Any:
        return make.packed_sequence_mask_function(ids)

    def local(mask: Any) -> Any:
        return make.remap_positions_for_packed_sequence(mask, positions)

    window = functools.partial(_sized, "window", "sliding_window")
    chunk = functools.partial(_sized, "chunk", "chunk_size")
    made: tuple[tuple[Callable[[Any], Any], torch.Tensor, Callable[..., Pattern | None]], ...] = (
        (lambda _: make.sliding_window_causal_mask_function(SIZE), causal & (j > i - SIZE), window),
        (lambda _: make.chunked_causal_mask_function(SIZE, i.new_zeros(1)), same_segment, chunk),
        # As transformers 5.0 to 5.17, 5.23, and 5.24 build the mask of packed sequences.
        (lambda mask: make.and_masks(mask, segments()), same_segment, functools.partial(_packed, False)),
        (lambda mask: make.and_masks(segments(), local(mask)), same_segment, functools.partial(_packed, True)),
        (lambda mask: make.and_masks(local(mask), segments()), same_segment, functools.partial(_packed, True)),
    )
    templates = []
    for function, expected, pattern in made:
        with contextlib.suppress(AttributeError, TypeError):  # another release of transformers
            values = function(make.causal_mask_function)(i.new_zeros(1, 1), 0, i, j)
            if torch.equal(values.expand(GRID, GRID), expected):
                templates.append(Template(function(_any), pattern))
    return tuple(templates)
