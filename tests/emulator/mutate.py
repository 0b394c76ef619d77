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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from cute_attn.emulator import EmulatorError, Schedule, using
from tests.emulator.equivalents import excuse
from tests.emulator.mutations import MUTATIONS, Mutant, applied, mutants
from tests.emulator.test_planner import SYNCHRONISED, emulated
from tests.support import batch_case, device_schedules, fp8_case
from tests.support.batch_case import E4M3, BatchCase, dims, heads, paged, ragged
from tests.support.batch_case import decode as batch_decode
from tests.support.matrix import decode, prefill
from tests.support.mla_case import MlaCase
from tests.support.right import assert_solved
from tests.support.schedules import ALL_SCHEDULES

MORE = tuple(Schedule("adversarial", seed) for seed in (3, 4, 5))  # for those that these do not catch
LAGGING = Schedule("lagging", 12)  # the producer of the second CTA of a pair


AnyCase = BatchCase | MlaCase | device_schedules.Case


@dataclass(frozen=True)
class Problems:
    """Problems of one kernel, on few multiprocessors, so that keys are not split where they need not be: long enough
    to reuse every stage of every ring, some with tiles that see no key; the cheapest first. `kernels`: the backend that
    is mutated; `launches`: multiprocessors and case of each.
    """

    arch: str
    kernels: str
    launches: tuple[tuple[int, AnyCase], ...]

    def mutates(self, ptx: str) -> bool:
        """Whether it is a kernel of the backend, or the merge of partial results beside fa2's."""
        return self.kernels == "fa2" or symbol(ptx).startswith(f"cute_attn_{self.kernels}")


BF16 = {"dtype": "bfloat16"}
dense = functools.partial(ragged, **heads(1, 1))
gathered = functools.partial(paged, page_size=3, **heads(1, 1))
fp8 = functools.partial(fp8_case.fp8, heads=(1, 1), **fp8_case.SIGNED, seed=2)


HOPPER_FA2, BLACKWELL_FA4, BLACKWELL_XQA = ("sm_90a", "fa2"), ("sm_100a", "fa4"), ("sm_100a", "xqa")


def on(target: tuple[str, str], sms: int, *cases: AnyCase) -> Problems:
    return Problems(*target, tuple((sms, case) for case in cases))


def on_latent(on_two: MlaCase, on_many: MlaCase) -> Problems:
    return Problems("sm_90a", "mla", ((2, on_two), (16, on_many)))


def on_hopper(make: Callable[..., AnyCase], **more: Any) -> Problems:
    """Recomputed tiles (large scores), tiles that see no key."""
    return on(
        ("sm_90a", "fa3"),
        1,
        make((300, 20), (700, 40), mask="causal", **more),
        make((140,), (500,), mask="causal", sm_scale=2.0, **more),
        make((600, 20), (60, 20), mask="causal", **more),
    )


def on_blackwell(make: Callable[..., AnyCase], split: int, **more: Any) -> Problems:
    """The same, items without queries, query tiles that begin at different kv tiles, items of one kv tile and of more
    than a ring has stages, and partial results.
    """
    return on(
        BLACKWELL_FA4,
        1,
        make((140, 0, 20, 30), (200, 30, 60, 50), mask="causal", **more),
        make((400, 130, 140), (200, 100, 200), mask="causal", **more),
        make((130, 20), (700, 390), mask="causal", sm_scale=2.0, **more),
        make((130,), (200,), fixed_split_size=split, **more),
    )


# Segments whose tiles wrap the ring of K and V, as the segments of a CTA wrap that of Q.
MANY = (300, 140, 700, 200, 390, 130, 5, 650, 150, 300, 260, 40, 700, 300, 200)


def on_umma(**more: Any) -> Problems:
    """Decode on tcgen05: a segment of less than a tile, cut ones, whole ones, and none; CTAs of many segments."""
    more |= {**heads(20, 1), **dims(64)}
    return on(
        BLACKWELL_XQA,
        3,
        batch_decode((300, 5, 0, 700), **more),
        batch_decode((1500, 5, 0, 1200), sm_scale=2.0, **more),
        batch_decode(MANY, **more),
    )


PROBLEMS = {
    "prefill": on(
        HOPPER_FA2, 1, prefill(140, 700, (2, 1), 64, mask="causal"), prefill(300, 40, (1, 1), 64, mask="causal")
    ),
    "decode": on(HOPPER_FA2, 132, decode(1500, (4, 1), 64)),
    "append": on(HOPPER_FA2, 1, prefill(40, 300, (1, 1), 128, **BF16), prefill(40, 0, (1, 1), 128, **BF16)),
    "ragged": on_hopper(ragged, **dims(128)),
    "gathered": on_hopper(gathered),
    "fp8": on_hopper(fp8),
    "xqa": on(("sm_90a", "xqa"), 2, batch_decode((300, 5, 0, 4000), kv_dtype=E4M3, **heads(2, 1), **dims(128))),
    # Latent attention: segments that are cut, whole and empty, rows of two groups; one of more CTAs than merge at once.
    "latent": on_latent(
        MlaCase(heads=3, q_lens=(1, 2, 1, 1), kv_lens=(0, 70, 500, 5), page_size=16),
        MlaCase(heads=3, q_lens=(1,), kv_lens=(800,), page_size=16),
    ),
    "latent fp8": on_latent(
        MlaCase(heads=20, q_lens=(1, 1, 1, 1), kv_lens=(0, 300, 100, 5), page_size=16, narrow=True),
        MlaCase(heads=3, q_lens=(1,), kv_lens=(800,), page_size=16, narrow=True),
    ),
    "planner": on(("sm_90a", "plan"), 132, *SYNCHRONISED),
    "tcgen05": on_blackwell(dense, 128),
    "tcgen05 gathered": on_blackwell(gathered, 42),
    "tcgen05 fp8": on_blackwell(fp8, 128, head_dim=64),
    # Pairs of CTAs with a query tile each, and S of two kv tiles in flight.
    "tcgen05 wide": on(
        BLACKWELL_FA4,
        1,
        dense((140, 0, 20, 30), (200, 30, 60, 50), mask="causal", **dims(256)),
        dense((130, 20), (60, 390), mask="causal", sm_scale=2.0, **dims(256)),
        dense((130,), (200,), fixed_split_size=128, **dims(256)),
        dense((140, 20, 20, 20, 30), (200, 0, 0, 0, 60), mask="causal", **dims(256)),
    ),
    # Decode with hardware conversions; four query rows, so that all warps write a partial result. Head dim 128: blocks.
    "decode nvfp4": on(
        BLACKWELL_XQA,
        3,
        batch_decode((300, 5, 0, 700), kv_dtype="nvfp4", **heads(4, 1), **dims(64)),
        *(batch_decode((1500, 5, 0, 70), kv_dtype="nvfp4", **heads(4, 1), **dims(dim)) for dim in (64, 128)),
    ),
    "decode sm_120a": on(
        ("sm_120a", "xqa"),
        2,
        batch_decode((300, 5, 0, 700), kv_dtype="nvfp4", **heads(4, 1), **dims(64)),
        batch_decode((300, 5, 0, 700), kv_dtype=E4M3, **heads(4, 1), **dims(128)),
    ),
    "decode umma": on_umma(),
    "decode umma fp8": on_umma(kv_dtype=E4M3),
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
    sms, case = asked.launches[launch]
    with using(asked.arch, schedule=schedule, rewrite=remember, sms=sms, kernels=asked.kernels):
        result = solve(case)
    assert result == "", f"the kernels themselves: {result}"
    return tuple(ptx for ptx in seen if asked.mutates(ptx))


def kernels(name: str, cases: int | None = None) -> list[str]:
    """PTX of the kernels that the problems of a name launch, or the first `cases` of them."""
    launches = range(len(PROBLEMS[name].launches))[:cases]
    return list(dict.fromkeys(ptx for launch in launches for ptx in launched(name, ALL_SCHEDULES[0], launch)))


def symbol(ptx: str) -> str:
    found = re.search(r"\.entry\s+(\w+)", ptx)
    assert found is not None
    return found[1]


def solve(case: AnyCase) -> str:
    """What is wrong, or ""."""
    try:
        with mock.patch.object(batch_case, "WORKSPACE", WORKSPACE):
            if isinstance(case, device_schedules.Case):
                return device_schedules.difference(case, emulated("sm_90a"), "cpu") or ""
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

    for schedule, (launch, (sms, case)) in itertools.product(schedules, enumerate(asked.launches)):
        with using(asked.arch, schedule=schedule, rewrite=rewrite, sms=sms, kernels=asked.kernels):
            try:
                by = "wrong result" if solve(case) else ""
            except EmulatorError as err:
                by = type(err).__name__
        if by:
            launched(name, schedule, launch)
            return by
    return ""


class Task(NamedTuple):
    """A mutant of a kernel that the problems of a name launch."""

    problem: str
    ptx: str
    mutant: Mutant

    @property
    def why(self) -> str:
        """Why it is equivalent, if it survives; "" where nothing excuses it."""
        return excuse(self.ptx, self.mutant)

    @property
    def key(self) -> str:
        return f"{self.problem} {hashlib.sha256(self.ptx.encode()).hexdigest()[:16]} {self.mutant.site} {self.mutant}"

    def kind(self, by: str) -> str:
        """One of `KINDS`."""
        return "caught" if by else "equivalent" if self.why else "missed"


Fate = tuple[Task, str]  # by what it was caught, "" if it survived
Report = dict[str, Any]
KINDS = ("caught", "equivalent", "missed")


def _try(task: Task) -> str:
    schedules = ALL_SCHEDULES[:1] if task.why else (*ALL_SCHEDULES, *MORE, LAGGING)
    return caught(*task, schedules)


def fates(tasks: list[Task], file: Path | None, jobs: int) -> Iterator[Fate]:
    """Fates of mutants, those first that a file of JSON lines knows, to which the others are added. Processes are
    forked, so that they share what has been compiled.
    """
    known = dict(map(json.loads, file.read_text().splitlines())) if file is not None and file.exists() else {}
    yield from ((task, known[task.key]) for task in tasks if task.key in known)
    new = [task for task in tasks if task.key not in known]
    with multiprocessing.get_context("fork").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        tried = map(_try, new) if pool is None else pool.imap(_try, new)
        for task, by in zip(new, tried, strict=True):
            if file is not None:
                with file.open("a") as lines:
                    lines.write(json.dumps([task.key, by]) + "\n")
            yield task, by


def reports(
    names: list[str], sample: int | None = None, word: str = "", *, jobs: int = 1, known: Path | None = None
) -> Iterator[tuple[Fate, Report]]:
    """Fates of the mutants described with `word`, or of `sample` of them of every kernel, chosen by a fixed seed; with
    each what is known so far.
    """
    chosen: list[list[Task]] = []
    counts: Counter[str] = Counter()
    for name in names:
        for ptx in kernels(name):
            found = [Task(name, ptx, mutant) for mutant in mutants(symbol(ptx), ptx) if word in str(mutant)]
            counts[name] += len(found)
            random.Random(0).shuffle(found)
            chosen.append(found[:sample])
    tasks = [task for turn in itertools.zip_longest(*chosen) for task in turn if task is not None]
    done: list[Fate] = []
    for fate in fates(tasks, known, jobs):
        done.append(fate)
        yield fate, summary(counts, done)


def summary(counts: Counter[str], done: list[Fate]) -> Report:
    """The fates that are known of `counts` mutants of the problems."""
    order = list(MUTATIONS)
    done = sorted(done, key=lambda fate: (list(counts).index(fate[0].problem), order.index(fate[0].mutant.mutation)))
    tried = Counter(task.problem for task, _ in done)
    mutations: dict[str, dict[str, int]] = {task.mutant.mutation: dict.fromkeys(KINDS, 0) for task, _ in done}
    for task, by in done:
        mutations[task.mutant.mutation][task.kind(by)] += 1
    totals = {kind: sum(tally[kind] for tally in mutations.values()) for kind in KINDS}
    survivors = [task for task, by in done if not by]
    return {
        "problems": {name: {"tried": tried[name], "mutants": n} for name, n in counts.items()},
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

    found: Report = {}
    for (task, by), found in reports(names, options.sample, options.only, jobs=options.jobs, known=options.fates):
        print(f"{task.problem}: {by or f'SURVIVED, {task.why}'}: {task.mutant}", file=sys.stderr)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
