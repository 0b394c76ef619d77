"""Rules of the decode kernel's rings with other bounds, so that small problems follow those of large ones; rings that
no rule has.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from cute_attn.kernels.formats import KV_BITS
from cute_attn.kernels.rules import Rule
from cute_attn.kernels.rules import steps as find_steps
from cute_attn.kernels.xqa import tiles
from cute_attn.kernels.xqa.host import variant
from cute_attn.runtime.arch import named
from perf import rings
from tests.support.xqa_case import DTYPES, XqaCase

RULES = dict(tiles.RULES)
HOPPER = named("sm_90a")
FORMATS = {"bf16": "", "fp16": "", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "nvfp4": "nvfp4"}
# Steps of `move_steps` after which no launch has clusters.
NO_CLUSTERS: dict[str, dict[int, int]] = {"segments": {13: 0, 17: 0, 25: 0, 65: 0}, "units": {5: 0, 9: 0}}


def forced_ring(text: str, case: XqaCase, shape: tiles.Shape, rows: int = 8) -> AbstractContextManager[object]:
    """Within, calls on Hopper have the ring of `text`, and of the rule for a shape what the text does not say."""
    q_dtype, kv_dtype = str(DTYPES[case.q]).removeprefix("torch."), FORMATS[case.kv]
    rule = tiles.find(HOPPER, KV_BITS[kv_dtype], case.head_dim, shape)
    out_dtype = "float8_e4m3fn" if case.out else q_dtype
    start = tiles.choose(q_dtype, kv_dtype, out_dtype, case.head_dim, rows, case.mask, rule, HOPPER)
    return rings.force_spec(rings.ring(text, start))


def move_steps(monkeypatch: pytest.MonkeyPatch, **steps: dict[int, int]) -> None:
    """Moves bounds of the ranges in all rules: by field, where a range begins, or ends (the first number beyond)."""
    for field, to in steps.items():
        bounds = {n for rules in RULES.values() for rule in rules for n in _bounds(rule, field)}
        assert to.keys() <= bounds, f"{field} has no step at {to.keys() - bounds}"
    for cache, rules in RULES.items():
        monkeypatch.setitem(tiles.RULES, cache, tuple(_moved(rule, steps) for rule in rules))
    moved = [rule for rules in tiles.RULES.values() for rule in rules]
    for field in steps.keys() & tiles.STEPS.keys():
        monkeypatch.setitem(tiles.STEPS, field, find_steps(moved, field))
    for make in (variant._rule_of, variant._request_steps):  # other functions, whose results no call has kept
        monkeypatch.setattr(variant, make.__name__, functools.partial(make))


def _bounds(rule: Rule[tiles.Rings], field: str) -> tuple[int, ...]:
    numbers = rule.when.get(field)
    return (numbers.start, numbers.stop) if isinstance(numbers, range) else ()


def _moved(rule: Rule[tiles.Rings], steps: dict[str, dict[int, int]]) -> Rule[tiles.Rings]:
    bounds = {field: _bounds(rule, field) for field in steps}
    changes = {field: range(*(steps[field].get(n, n) for n in ends)) for field, ends in bounds.items() if ends}
    return replace(rule, when={**rule.when, **changes})
