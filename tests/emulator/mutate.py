"""Mutates our kernels in one place at a time and reports whether the emulator detects it.

    python -m tests.emulator.mutate [--arch sm_90a] [--problem NAME] [--sample N] [--jobs 2] [--fates FILE] [--out FILE]

A mutant removes or alters one barrier, wait, fence, arrival or count in the PTX. It is caught if a check raises or the
result is wrong, on any of the schedules. Survivors are listed with the reason why they are equivalent, where one is
known (`equivalents.py`; these are tried on the eager schedule alone), or as missed.

Mutants are tried in an order drawn from a fixed seed, those of all problems by turns, and `--out` is written as they
are: what a run has tried when it is stopped is a sample. With `--fates`, the next run begins with those mutants of the
same kernels whose fates the file knows.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cute_attn.emulator import EmulatorError, Schedule, using
from tests.emulator.equivalents import excuse
from tests.emulator.mutations import MUTATIONS, Mutant, applied, mutants
from tests.emulator.patched import sharing
from tests.support import batch_case
from tests.support.batch_case import E4M3, BatchCase, dims, heads, paged, ragged
from tests.support.batch_case import decode as batch_decode
from tests.support.fp8_case import Fp8Case
from tests.support.matrix import decode, prefill
from tests.support.mla_case import MlaCase
from tests.support.right import assert_solved
from tests.support.schedules import ALL_SCHEDULES

MORE = tuple(Schedule("adversarial", seed) for seed in (3, 4, 5))  # for those that these do not catch
LAGGING = Schedule("lagging", 12)  # the producer of the second CTA of a pair


# --- problems ---------------------------------------------------------------------------------------------------------

AnyCase = BatchCase | Fp8Case | MlaCase


@dataclass(frozen=True)
class Problems:
    """Problems of one kernel, on few multiprocessors, so that keys are not split where they need not be: long enough
    to reuse every stage of every ring, some with tiles that see no key; the cheapest first. `kernels`: the backend that
    is mutated; `sms`: multiprocessors for all cases, or for each.
    """

    arch: str
    kernels: str
    sms: int | tuple[int, ...]
    cases: tuple[AnyCase, ...]

    def launches(self) -> list[tuple[int, AnyCase]]:
        """Multiprocessors and case of each launch."""
        sms = self.sms if isinstance(self.sms, tuple) else (self.sms,) * len(self.cases)
        return list(zip(sms, self.cases, strict=True))

    def mutates(self, ptx: str) -> bool:
        """Whether it is a kernel of the backend, or the merge of partial results beside fa2's."""
        return self.kernels == "fa2" or symbol(ptx).startswith(f"cute_attn_{self.kernels}")


BF16 = {"dtype": "bfloat16"}
ONE = heads(1, 1)
# Segments whose tiles wrap the ring of K and V, as the segments of a CTA wrap that of Q.
MANY = (300, 140, 700, 200, 390, 130, 5, 650, 150, 300, 260, 40, 700, 300, 200)
PROBLEMS = {
    "prefill": Problems(
        "sm_90a", "fa2", 1, (prefill(140, 700, (2, 1), 64, mask="causal"), prefill(300, 40, (1, 1), 64, mask="causal"))
    ),
    "decode": Problems("sm_90a", "fa2", 132, (decode(1500, (4, 1), 64),)),
    "append": Problems(
        "sm_90a", "fa2", 1, (prefill(40, 300, (1, 1), 128, **BF16), prefill(40, 0, (1, 1), 128, **BF16))
    ),
    # Of Hopper's kernels: recomputed tiles (large scores), tiles that see no key.
    "ragged": Problems(
        "sm_90a",
        "fa3",
        1,
        (
            ragged((300, 20), (700, 40), mask="causal", **dims(128)),
            ragged((140,), (500,), mask="causal", sm_scale=2.0, **dims(128)),
            ragged((600, 20), (60, 20), mask="causal", **dims(128)),
        ),
    ),
    "gathered": Problems(
        "sm_90a",
        "fa3",
        1,
        (
            paged((140, 20), (400, 40), 3, mask="causal", **ONE),
            paged((140,), (500,), 3, mask="causal", sm_scale=2.0, **ONE),
            paged((600, 20), (60, 20), 3, mask="causal", **ONE),
        ),
    ),
    "fp8": Problems(
        "sm_90a",
        "fa3",
        1,
        (
            Fp8Case((140, 20), (400, 40), (1, 1), scales="signed", causal=True, seed=2),
            Fp8Case((140,), (500,), (1, 1), causal=True, sm_scale=1.0),
            Fp8Case((600, 20), (60, 20), (1, 1), causal=True),
        ),
    ),
    "xqa": Problems("sm_90a", "xqa", 2, (batch_decode((300, 5, 0, 700), kv_dtype=E4M3, **heads(2, 1), **dims(128)),)),
    # Latent attention: segments that are cut, whole and empty, rows of two groups; one of more CTAs than merge at once.
    "latent": Problems(
        "sm_90a",
        "mla",
        (2, 16),
        (
            MlaCase(heads=3, q_lens=(1, 2, 1, 1), kv_lens=(0, 70, 500, 5), page_size=16),
            MlaCase(heads=3, q_lens=(1,), kv_lens=(800,), page_size=16),
        ),
    ),
    "latent fp8": Problems(
        "sm_90a",
        "mla",
        (2, 16),
        (
            MlaCase(heads=20, q_lens=(1, 1, 1, 1), kv_lens=(0, 300, 100, 5), page_size=16, narrow=True),
            MlaCase(heads=3, q_lens=(1,), kv_lens=(800,), page_size=16, narrow=True),
        ),
    ),
    # Of Blackwell's: the same, items without queries, query tiles that begin at different kv tiles, items of one kv
    # tile and of more than a ring has stages, and partial results.
    "tcgen05": Problems(
        "sm_100a",
        "fa4",
        1,
        (
            ragged((140, 0, 20, 30), (200, 30, 60, 50), mask="causal", **ONE),
            ragged((400, 130, 140), (200, 100, 200), mask="causal", **ONE),
            ragged((130, 20), (700, 390), mask="causal", sm_scale=2.0, **ONE),
            ragged((130,), (200,), fixed_split_size=128, **ONE),
        ),
    ),
    "tcgen05 gathered": Problems(
        "sm_100a",
        "fa4",
        1,
        (
            paged((140, 20, 30), (200, 40, 50), 3, mask="causal", **ONE),
            paged((400, 130, 140), (200, 100, 200), 3, mask="causal", **ONE),
            paged((130, 20), (700, 390), 3, mask="causal", sm_scale=2.0, **ONE),
            paged((130,), (200,), 3, fixed_split_size=42, **ONE),
        ),
    ),
    "tcgen05 fp8": Problems(
        "sm_100a",
        "fa4",
        1,
        (
            Fp8Case((140, 20, 30), (200, 40, 50), (1, 1), scales="signed", head_dim=64, causal=True, seed=2),
            Fp8Case((400, 130, 140), (200, 100, 200), (1, 1), head_dim=64, causal=True),
            Fp8Case((130, 20), (700, 390), (1, 1), head_dim=64, causal=True, sm_scale=1.0),
            Fp8Case((130,), (200,), (1, 1), head_dim=64, fixed_split_size=128),
        ),
    ),
    # Pairs of CTAs with a query tile each, and S of two kv tiles in flight.
    "tcgen05 wide": Problems(
        "sm_100a",
        "fa4",
        1,
        (
            ragged((140, 0, 20, 30), (200, 30, 60, 50), mask="causal", **ONE, **dims(256)),
            ragged((130, 20), (60, 390), mask="causal", sm_scale=2.0, **ONE, **dims(256)),
            ragged((130,), (200,), fixed_split_size=128, **ONE, **dims(256)),
            ragged((140, 20, 20, 20, 30), (200, 0, 0, 0, 60), mask="causal", **ONE, **dims(256)),
        ),
    ),
    # Decode with hardware conversions; four query rows, so that all warps write a partial result. Head dim 128: blocks.
    "decode nvfp4": Problems(
        "sm_100a",
        "xqa",
        3,
        (
            batch_decode((300, 5, 0, 700), kv_dtype="nvfp4", **heads(4, 1), **dims(64)),
            batch_decode((1500, 5, 0, 70), kv_dtype="nvfp4", **heads(4, 1), **dims(64)),
            batch_decode((1500, 5, 0, 70), kv_dtype="nvfp4", **heads(4, 1), **dims(128)),
        ),
    ),
    "decode sm_120a": Problems(
        "sm_120a",
        "xqa",
        2,
        (
            batch_decode((300, 5, 0, 700), kv_dtype="nvfp4", **heads(4, 1), **dims(64)),
            batch_decode((300, 5, 0, 700), kv_dtype=E4M3, **heads(4, 1), **dims(128)),
        ),
    ),
    # Decode on tcgen05: a segment of less than a tile, cut ones, whole ones, and none; CTAs of many segments.
    "decode umma": Problems(
        "sm_100a",
        "xqa",
        3,
        (
            batch_decode((300, 5, 0, 700), **heads(20, 1), **dims(64)),
            batch_decode((1500, 5, 0, 1200), sm_scale=2.0, **heads(20, 1), **dims(64)),
            batch_decode(MANY, **heads(20, 1), **dims(64)),
        ),
    ),
    "decode umma fp8": Problems(
        "sm_100a",
        "xqa",
        3,
        (
            batch_decode((300, 5, 0, 700), kv_dtype=E4M3, **heads(20, 1), **dims(64)),
            batch_decode((1500, 5, 0, 1200), kv_dtype=E4M3, sm_scale=2.0, **heads(20, 1), **dims(64)),
            batch_decode(MANY, kv_dtype=E4M3, **heads(20, 1), **dims(64)),
        ),
    ),
}
WORKSPACE = 1 << 20  # enough for these problems; every launch marks each byte of it


@functools.cache
def launched(name: str, schedule: Schedule, launch: int) -> tuple[str, ...]:
    """PTX of the kernels that a launch of the problems of a name runs, which must be right."""
    seen: dict[str, None] = {}

    def remember(ptx: str) -> str:
        seen[ptx] = None
        return ptx

    asked = PROBLEMS[name]
    sms, case = asked.launches()[launch]
    with using(asked.arch, schedule=schedule, rewrite=remember, sms=sms, kernels=asked.kernels):
        result = solve(case)
    assert result == "", f"the kernels themselves: {result}"
    return tuple(ptx for ptx in seen if asked.mutates(ptx))


def kernels(name: str, cases: int | None = None) -> list[str]:
    """PTX of the kernels that the problems of a name launch, or the first `cases` of them."""
    launches = range(len(PROBLEMS[name].launches()))[:cases]
    return list(dict.fromkeys(ptx for launch in launches for ptx in launched(name, ALL_SCHEDULES[0], launch)))


def symbol(ptx: str) -> str:
    found = re.search(r"\.entry\s+(\w+)", ptx)
    assert found is not None
    return found[1]


def solve(case: AnyCase) -> str:
    """What is wrong, or ""."""
    try:
        with mock.patch.object(batch_case, "WORKSPACE", WORKSPACE):
            if isinstance(case, MlaCase):
                case.check(case.trtllm(backend="emulator"))
            else:
                assert_solved(case, backend="emulator")
    except AssertionError as wrong:
        return str(wrong) or "wrong"
    return ""


def caught(name: str, original: str, mutant: Mutant, schedules: tuple[Schedule, ...] = ALL_SCHEDULES) -> str:
    """What noticed the mutant of a kernel, where the kernel itself is right, or "" if it survived all schedules."""
    changed, asked = applied(mutant, original), PROBLEMS[name]

    def rewrite(ptx: str) -> str:
        return changed if ptx == original else ptx

    for schedule, (launch, (sms, case)) in itertools.product(schedules, enumerate(asked.launches())):
        settings = using(asked.arch, schedule=schedule, rewrite=rewrite, sms=sms, kernels=asked.kernels)
        with sharing(original, changed), settings:
            try:
                by = "wrong result" if solve(case) else ""
            except EmulatorError as err:
                by = type(err).__name__
        if by:
            launched(name, schedule, launch)
            return by
    return ""


Report = dict[str, Any]
KINDS = ("caught", "equivalent", "missed")


@dataclass
class Fate:
    """What became of a mutant: `by` what it was caught, "" if it survived."""

    problem: str
    mutant: Mutant
    why: str  # it is equivalent, if it survives
    by: str = ""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return "caught" if self.by else "equivalent" if self.why else "missed"


class Fates:
    """Fates by problem, kernel and mutant, in a file of JSON lines."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.known: dict[str, str] = dict(json.loads(line) for line in lines)

    def key(self, problem: str, ptx: str, mutant: Mutant) -> str:
        return f"{problem} {hashlib.sha256(ptx.encode()).hexdigest()[:16]} {mutant.site} {mutant}"

    def add(self, key: str, by: str) -> None:
        self.known[key] = by
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([key, by]) + "\n")


_Task = tuple[str, str, Mutant]  # problem, PTX of the kernel, mutant


def _try(task: _Task) -> tuple[_Task, str]:
    name, ptx, mutant = task
    return task, caught(
        name, ptx, mutant, schedules=ALL_SCHEDULES[:1] if excuse(ptx, mutant) else (*ALL_SCHEDULES, *MORE, LAGGING)
    )


def fates(tasks: list[_Task], known: Fates, jobs: int) -> Iterator[Fate]:
    """Fates of mutants, in any order. Processes are forked, so that they share what has been compiled."""
    new = [task for task in tasks if known.key(*task) not in known.known]
    for task in tasks:
        if known.key(*task) in known.known:
            yield Fate(task[0], task[2], excuse(*task[1:]), known.known[known.key(*task)])
    with multiprocessing.get_context("fork").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        run = map if pool is None else pool.imap_unordered
        for task, by in run(_try, new):
            known.add(known.key(*task), by)
            yield Fate(task[0], task[2], excuse(*task[1:]), by)


def report(
    names: list[str],
    sample: int | None = None,
    word: str = "",
    *,
    jobs: int = 1,
    known: Path | None = None,
    watch: Callable[[Fate, Report], None] | None = None,
) -> Report:
    """Fates of the mutants described with `word`, or of `sample` of them of every kernel, chosen by a fixed seed.
    `watch` is called after every mutant.
    """
    chosen: list[list[_Task]] = []
    counts: dict[str, int] = {}
    for name in names:
        for ptx in kernels(name):
            found = [(name, ptx, mutant) for mutant in mutants(symbol(ptx), ptx) if word in str(mutant)]
            counts[name] = counts.get(name, 0) + len(found)
            random.Random(0).shuffle(found)
            chosen.append(found[:sample])
    tasks = [task for turn in itertools.zip_longest(*chosen) for task in turn if task is not None]
    done: list[Fate] = []
    for fate in fates(tasks, Fates(known), jobs):
        done.append(fate)
        if watch is not None:
            watch(fate, summary(counts, done))
    return summary(counts, done)


def summary(counts: dict[str, int], done: list[Fate]) -> Report:
    """The fates that are known of `counts` mutants of the problems."""
    order = [name for name, *_ in MUTATIONS]
    done = sorted(done, key=lambda fate: (list(counts).index(fate.problem), order.index(fate.mutant.mutation)))
    problems = {name: {"tried": sum(x.problem == name for x in done), "mutants": n} for name, n in counts.items()}
    mutations: dict[str, dict[str, int]] = {fate.mutant.mutation: dict.fromkeys(KINDS, 0) for fate in done}
    for fate in done:
        mutations[fate.mutant.mutation][fate.kind] += 1
    totals = {kind: sum(tally[kind] for tally in mutations.values()) for kind in KINDS}
    survivors = [fate for fate in done if not fate.by]
    return {
        "problems": problems,
        **totals,
        "share": totals["caught"] / max(totals["caught"] + totals["missed"], 1),
        "mutations": mutations,
        "survivors": [{"problem": x.problem, "mutant": str(x.mutant), "equivalent": x.why} for x in survivors],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a", choices=sorted({asked.arch for asked in PROBLEMS.values()}))
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="instead of all of an architecture")
    parser.add_argument("--sample", type=int, help="mutants of a kernel, instead of all")
    parser.add_argument("--only", default="", help="mutants whose description holds this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--fates", type=Path, help="JSON lines with what became of mutants, read and extended")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.problem or [name for name, asked in PROBLEMS.items() if asked.arch == options.arch]

    def watch(fate: Fate, found: Report) -> None:
        print(f"{fate.problem}: {fate.by or 'SURVIVED'}: {fate.mutant} {'' if fate.by else fate.why}", file=sys.stderr)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    found = report(names, options.sample, options.only, jobs=options.jobs, known=options.fates, watch=watch)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
