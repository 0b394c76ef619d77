"""Which problems of a matrix are emulated: a few that have all that any of them has."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

Problem = TypeVar("Problem")
Trait = tuple[Hashable, ...]

NUMBERS = ("window_left", "logits_soft_cap", "sm_scale", "q_scale", "k_scale", "v_scale", "spike", "v_mean")
FREE = ("seed", "rope_scale", "rope_theta", "spike_key", "longest_item")  # their values choose no path
HEADS, LENGTHS = ("num_qo_heads", "num_kv_heads"), ("qo_lens", "kv_lens")
TILE = 64  # tokens of the smallest one


def needed(
    problems: Iterable[Problem], features: Callable[[Problem], Any] | None = None, besides: Iterable[Problem] = ()
) -> list[Problem]:
    """A few of the problems that have all traits, and all pairs of features, that any of them has.

    `besides`: problems that run anyway. Features and fields choose the code of a kernel. What is left out has no code
    of its own but what three of them choose together.
    """

    def own(problem: Problem) -> set[Trait]:
        return _traits(problem) | (_pairs(features(problem)) if features else set())

    problems = list(problems)
    seen, kept = set[Trait]().union(*map(own, besides)), set[int]()
    missing = [own(problem) - seen for problem in problems]
    while any(missing):
        richest = max(range(len(problems)), key=lambda i: (len(missing[i]), i))
        missing = [traits - missing[richest] for traits in missing]
        kept.add(richest)
    return [problems[i] for i in sorted(kept)]


def _traits(problem: Any) -> set[Trait]:
    """The value of every field, and head dims with the kind of mask. Of numbers the sign counts, of heads the group, of
    each request's lengths how many tiles they take, and whether it has more queries than keys.
    """
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    qo_heads, kv_heads = (fields[name] for name in HEADS)
    lengths = [fields[name] for name in LENGTHS]
    head_dims = (value for name, value in fields.items() if name.startswith("head_dim"))
    found: set[Trait] = {("group", qo_heads // kv_heads), ("code", *head_dims, _mask(fields))}
    found.add(("requests", min(len(lengths[0]), 2), any(lengths[0]), any(lengths[1])))
    for qo_len, kv_len in zip(*lengths, strict=True):
        found.add(("tiles", min(-(-qo_len // TILE), 2), min(-(-kv_len // TILE), 2), qo_len > kv_len))
    for name, value in fields.items():
        if name in NUMBERS:
            found.add((name, value and (value > 0) - (value < 0)))
        elif name not in (*FREE, *HEADS, *LENGTHS):
            found.add((name, value))
    return found


def _mask(fields: dict[str, Any]) -> str:
    """The kind of mask."""
    mask: str = fields["mask"]
    if mask in ("custom", "packed"):
        return "bits"
    return "band" if mask != "items" and fields["window_left"] >= 0 else mask


def _pairs(features: Any) -> set[Trait]:
    values = features._replace(num_qo_heads=0, num_kv_heads=0)._asdict().items()
    return set(itertools.combinations(values, 2))
