"""Which tokens see which, read from the mask functions that transformers builds, without making a mask of them.

transformers describes a mask by nested closures: `and_masks(sliding_window_overlay(w), causal_mask_function)`. They are
recognised by comparing their code objects with those of a template that transformers makes here, and a template counts
only where its values on a small grid are the ones that `Pattern` stands for. What is not recognised, because a model
adds something or because another release builds masks differently, is computed from the exact boolean mask.
"""

from __future__ import annotations

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


class _Any:
    """A placeholder in a template for a function that is recognised on its own."""

    name = "any"  # under which `_same` puts the function

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("a placeholder is not called")


class Template(NamedTuple):
    """A mask function whose parameters are to be found in another one of the same code."""

    function: Callable[..., Any]
    size: str  # the name of the window or chunk among the parameters
    kind: str  # the field of `Pattern` that it fills


class Packed(NamedTuple):
    """A mask of packed sequences around another one."""

    function: Callable[..., Any]
    local: bool  # positions count within a segment; else along the row, which moves chunks but no window


def recognise(function: Callable[..., Any]) -> Pattern | None:
    """Return the pattern of a mask function; None: it has to be evaluated."""
    if function is masking_utils.causal_mask_function:
        return Pattern(True)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(False)
    for template in _templates():
        found: dict[str, Any] = {}
        if _same(function, template.function, found) and isinstance(found.get(template.size), int):
            sizes = {template.kind: found[template.size]}
            return Pattern(True, **sizes, left_padding=found.get("left_padding"))
    for packed in _packed_templates():
        found = {}
        if not _same(function, packed.function, found):
            continue
        inner, ids = recognise(found[_Any.name]), found.get("packed_sequence_mask")
        if inner is None or inner.segment_ids is not None or not isinstance(ids, torch.Tensor):
            continue
        positions = found.get("position_ids")
        if isinstance(positions, torch.Tensor) if packed.local else not inner.chunk:
            return inner._replace(segment_ids=ids, positions=positions)
    return None


def _same(value: Any, template: Any, found: dict[str, Any], name: str = "") -> bool:
    """Compare a mask function with a template by code; put what their cells hold otherwise into `found`."""
    if isinstance(template, _Any):
        found[_Any.name] = value
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


def _grid(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of rows and of columns."""
    indices = torch.arange(size, device="cpu")
    return indices[:, None], indices[None, :]


@functools.cache
def _templates() -> tuple[Template, ...]:
    i, j = _grid(GRID)
    causal = j <= i
    made = (
        ("sliding_window_causal_mask_function", (), "sliding_window", "window", causal & (j > i - SIZE)),
        (
            "chunked_causal_mask_function",
            (i.new_zeros(1),),
            "chunk_size",
            "chunk",
            causal & (i // SIZE == j // SIZE),
        ),
    )
    templates = []
    for name, more, size, kind, expected in made:
        try:
            function = getattr(masking_utils, name)(SIZE, *more)
            values = function(i.new_zeros(1, 1), 0, i, j)
            as_expected = torch.equal(values.expand(GRID, GRID), expected)
        except (AttributeError, TypeError):  # another release of transformers
            continue
        if as_expected:
            templates.append(Template(function, size, kind))
    return tuple(templates)


@functools.cache
def _packed_templates() -> tuple[Packed, ...]:
    i, j = _grid(4)
    ids, positions = j // 2, j % 2  # 0011 and 0101
    expected = (j <= i) & (ids[0][:, None] == ids[0])
    templates = []
    for make, local in (_segments_last, False), (_segments_last_of_local, True), (_segments_first_of_local, True):
        try:
            values = make(masking_utils.causal_mask_function, positions, ids)(ids.new_zeros(1, 1), 0, i, j)
            if torch.equal(values.expand(4, 4), expected):
                templates.append(Packed(make(_Any(), positions, ids), local))
        except (AttributeError, TypeError):  # another release of transformers
            continue
    return tuple(templates)


def _segments_last(mask: Any, positions: torch.Tensor, ids: torch.Tensor) -> Callable[..., Any]:
    """Return the mask of packed sequences as transformers 5.0 to 5.17 build it."""
    function: Callable[..., Any] = masking_utils.and_masks(mask, masking_utils.packed_sequence_mask_function(ids))
    return function


def _segments_first_of_local(mask: Any, positions: torch.Tensor, ids: torch.Tensor) -> Callable[..., Any]:
    """Return the mask of packed sequences as transformers 5.23 builds it."""
    local = masking_utils.remap_positions_for_packed_sequence(mask, positions)
    function: Callable[..., Any] = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(ids), local)
    return function


def _segments_last_of_local(mask: Any, positions: torch.Tensor, ids: torch.Tensor) -> Callable[..., Any]:
    """Return the mask of packed sequences as transformers 5.24 builds it."""
    return _segments_last(masking_utils.remap_positions_for_packed_sequence(mask, positions), positions, ids)
