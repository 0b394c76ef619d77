"""Which of the emulator's schedules a problem runs on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from cute_attn.emulator import Schedule
from tests.support.batch_case import BatchCase

SCHEDULES = (Schedule("delayed", 1), Schedule("adversarial", 2))
ALL_SCHEDULES = (Schedule(), *SCHEDULES)
KINDS = ("eager", "delayed", "adversarial")  # for problems that seed their schedules

Problem = TypeVar("Problem")


def in_turn(
    problems: Iterable[Problem],
    schedules: Sequence[Any] = ALL_SCHEDULES,
    structure: Callable[[Problem], Hashable] | None = None,
    seen: Iterable[Hashable] = (),
) -> list[tuple[Problem, Any]]:
    """Every problem with one schedule, in turn, and the first problem of each structure with all of them.

    A schedule can find what is wrong with the order of synchronising instructions. Problems of one structure have
    these in common; they differ in lengths, scales and other numbers. A structure may be a frozenset of parts, each of
    which needs a first problem. `seen`: parts that other problems have.
    """
    found, known = [], set(seen)
    for i, problem in enumerate(problems):
        first = structure is not None and not parts_of(structure(problem)) <= known
        known |= parts_of(structure(problem)) if structure else set()
        found += [(problem, schedule) for schedule in (schedules if first else [schedules[i % len(schedules)]])]
    return found


def parts_of(structure: Hashable) -> frozenset[Hashable]:
    return structure if isinstance(structure, frozenset) else frozenset({structure})


def all_alike(problem: object) -> None:
    """The structure of problems of one kernel."""


def way_of_keys(problem: BatchCase) -> str:
    """How K and V are copied: "dense", in "boxes" of a page, or rows "gathered" from small pages."""
    if not problem.paged:
        return "dense"
    return "boxes" if problem.page_size >= 16 else "gathered"


def structure(problem: BatchCase) -> frozenset[Hashable]:
    """What decides the order of synchronising instructions of a persistent kernel: its tile, by the head dims, and what
    its warps do for keys and masks.
    """
    mask = "bits" if problem.mask in ("custom", "packed") else problem.mask
    return frozenset({(problem.head_dim_qk, problem.head_dim_vo), (problem.kv_dtype, mask, way_of_keys(problem))})
