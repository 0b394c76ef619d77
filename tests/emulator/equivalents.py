"""Mutants that no check can notice, because they break nothing: which they are, and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from tests.emulator.mutations import (
    ACCUMULATES,
    P_FULL,
    Q_FULL,
    WAIT,
    Mutant,
    arrives_at,
    sites,
    waits_for_copied_queries,
)


def clears(ptx: str) -> int:
    """Index of the wait before the loop that clears rows of V in a Blackwell kernel, of all mbarrier waits; or -1."""
    zeros = r"st\.shared(?:::cluster)?\.v4\.b32 \[[^\]]+\], \{(%\w+), \1, \1, \1\};"
    found = re.search(zeros + r"(?:(?!mbarrier)[\s\S])*?fence\.proxy\.async", ptx)
    return -1 if found is None else len(sites(ptx[: found.start()], WAIT)) - 1


def waited_again(ptx: str, mutant: Mutant) -> bool:
    """Whether the warp waits for its stores to tensor memory once more before it arrives anywhere."""
    waits = sites(ptx, r"tcgen05\.wait::st")[mutant.site :]
    between = ptx[waits[0].end() : waits[1].start()] if len(waits) > 1 else "mbarrier.arrive"
    return "mbarrier.arrive" not in between and "griddepcontrol.wait" not in between


def keeps_always(ptx: str, mutant: Mutant) -> bool:
    """Whether the flag of a product that may begin a sum is the constant 1."""
    at = sites(ptx, ACCUMULATES)[mutant.site]
    flags = re.findall(r"setp\.ne\.s32 keep, (%\w+), 0;", ptx[: at.start()])
    return at.group().endswith("keep;") and re.search(rf"mov\.b32\s+{flags[-1]}, 1;", ptx) is not None


def drains(ptx: str, mutant: Mutant) -> bool:
    """Whether a CTA of a pair waits, at its end, for a slot to become free: of all waits that follow on each other at
    once, those for slots of K and V are the only four or more.
    """
    waits = sites(ptx, WAIT)
    others = re.compile(r"mbarrier|cp\.async|tcgen05|\bld\.|\$L_|@%p")
    gaps = itertools.pairwise(waits)
    ends = [i for i, (one, following) in enumerate(gaps) if others.search(ptx, one.end(), following.start())]
    first = max((i + 1 for i in ends if i < mutant.site), default=0)
    last = next((i for i in ends if i >= mutant.site), len(waits) - 1)
    return "cta_group::2" in ptx and last - first >= 3


LATENT_SYNC = re.compile(r"cute_attn_mla_\d")  # latent attention on mma.sync


def behind_the_tiles(ptx: str, mutant: Mutant) -> bool:
    """Whether it is the last wait for copies of latent attention on mma.sync, or the barrier behind it."""
    if not LATENT_SYNC.match(mutant.kernel):
        return False
    wait = sites(ptx, r"cp\.async\.wait_group")[-1]
    barrier = next(found for found in sites(ptx, r"bar\.sync") if found.start() > wait.end())
    return mutant.line in [ptx[: found.start()].count("\n") + 1 for found in (wait, barrier)]


def before(ptx: str, mutant: Mutant, pattern: str) -> bool:
    """Whether `pattern` is what comes next, of barriers, products, copies and loads, behind a wait or fence of latent
    attention on wgmma."""
    if not mutant.kernel.startswith("cute_attn_mla_wgmma"):
        return False
    found = sites(ptx, WAIT if mutant.mutation == "mbarrier wait removed" else r"fence\.")[mutant.site]
    step = re.compile(r"(?<![\w.])(?:mbarrier|wgmma|bar|cp|ld)\.[\w.:]+").search(ptx, found.end())
    return step is not None and re.match(pattern, step[0]) is not None


GATHERS = "cp.async.cg.shared.global"  # in the Hopper kernel for small pages


def brought_with_v(ptx: str, mutant: Mutant) -> bool:
    """Whether a Blackwell kernel that gathers waits for K between the products of the V before it."""
    waits = sites(ptx, WAIT)[max(mutant.site - 1, 0) : mutant.site + 1]
    between = ptx[waits[0].end() : waits[-1].start()]
    gathers = mutant.kernel.startswith("cute_attn_fa4") and GATHERS in ptx
    return gathers and ", keep;" in between and "tcgen05.commit" not in between


# Survivors that break nothing: (mutation, pattern of what identifies the site) -> why.
EQUIVALENT: tuple[tuple[str, Callable[[str, Mutant], bool], str], ...] = (
    (
        "commit of copies removed",
        lambda ptx, mutant: mutant.kernel.startswith("cute_attn_fa2") and mutant.site == 0,
        "the copies of q join the group of the first kv tile, which is waited for before either is read",
    ),
    (
        "wait for copies one group late",
        lambda ptx, mutant: (
            mutant.kernel.startswith("cute_attn_fa2") and mutant.site == len(sites(ptx, r"cp\.async\.wait_group")) - 1
        ),
        "the newest group at the end is empty: the last step starts no copies, and with no step only q is on its way",
    ),
    *(
        (
            mutation,
            lambda ptx, mutant: (
                mutant.kernel.startswith("cute_attn_xqa")
                and mutant.site == len(sites(ptx, r"cp\.async\.wait_group|cp\.async\.wait_all")) - 1
            ),
            "at the end all groups are empty: the last steps of a segment start no copies",
        )
        for mutation in ("wait for copies removed", "wait for copies one group late")
    ),
    (
        "wait for copies one group late",
        behind_the_tiles,
        "queries, for which it waits where there is no tile, are in the oldest group: of three stages the second one",
    ),
    (
        "barrier removed",
        lambda ptx, mutant: "e4m3x2" in ptx and behind_the_tiles(ptx, mutant),
        "outputs of 32 rows end before the tile in 16 bits, which slower warps still read",
    ),
    (
        "fence removed",
        lambda ptx, mutant: "fence.mbarrier_init" in ptx and mutant.site < 2,
        "the fence beside it is enough: either makes new mbarriers visible to TMA and to commits",
    ),
    (
        "wgmma fence removed",
        lambda ptx, mutant: True,
        "no register of its product was written since the fence before: the emulator reports those that were",
    ),
    (
        "mbarrier wait removed",
        lambda ptx, mutant: before(ptx, mutant, WAIT),
        "of the first half of a tile: producers bring it before the second one, and arrive there behind both",
    ),
    *(
        (
            mutation,
            lambda ptx, mutant: before(ptx, mutant, r"bar\.sync"),
            "of the other warpgroup's tile: that one waited for both halves, and fenced, before it left the P for "
            "which this one waits next",
        )
        for mutation in ("mbarrier wait removed", "fence removed")
    ),
    (
        "fence removed",
        lambda ptx, mutant: "e4m3x2" in ptx and before(ptx, mutant, r"mbarrier\.arrive"),
        "the warpgroup that computes scores fences between its wait and the product, as it must for queries: a proxy "
        "fence on the path between write and read is enough",
    ),
    (
        "fence removed",
        lambda ptx, mutant: (
            "e4m3x2" in ptx
            and before(ptx, mutant, r"wgmma\.fence")
            and "wgmma.mma" in ptx[: sites(ptx, r"fence\.")[mutant.site].start()]
        ),
        "of scores that are not a segment's first: who converts keys fences them, and the first scores' fence, before "
        "P, covers the queries",
    ),
    (
        "mbarrier wait removed",
        lambda ptx, mutant: mutant.kernel.startswith("cute_attn_fa3") and GATHERS in ptx and mutant.site in (7, 11, 13),
        "of gathered tiles the threads that bring a V bring the next K with it, for which was waited already; who "
        "passes over a tile waits for its V",
    ),
    (
        "mbarrier wait removed",
        lambda ptx, mutant: mutant.kernel.startswith("cute_attn_fa4") and clears(ptx) - mutant.site in (1, 2),
        "Q of a work item is loaded after the products of the item before that read Q; these waited for its cleared "
        "rows and for all V but the last, so with two stages or more neither can be behind",
    ),
    (
        "mbarrier wait removed",
        brought_with_v,
        "the threads that bring a V bring the next K with it, and arrive for both behind the copies of both",
    ),
    (
        "mbarrier wait removed",
        drains,
        "commits of one thread arrive in order: of one query tile, O's is the last, and both epilogues wait for it",
    ),
    (
        "first product accumulates",
        keeps_always,
        "it does already: of the steps in which both query tiles have an output",
    ),
    (
        "wait for tensor memory stores removed",
        waited_again,
        "rescaled outputs: the wait for P, which the warp stores next, covers them",
    ),
    (
        "tensor memory fence removed",
        lambda ptx, mutant: (
            (at := sites(ptx, r"tcgen05\.fence")[mutant.site].start()) < ptx.find("griddepcontrol.wait")
            and "tcgen05.st" not in ptx[:at]
        ),
        "no asynchronous operation in tensor memory precedes: the allocation is complete when the warp goes on",
    ),
    (
        "tensor memory fence removed",
        lambda ptx, mutant: sites(ptx, r"tcgen05\.fence")[mutant.site].start() > ptx.rfind("mbarrier."),
        "at the end no operation is outstanding: fences and waits of the last hand-overs have ordered all before the "
        "deallocation, which is not asynchronous",
    ),
    (
        "mbarrier wait removed",
        waits_for_copied_queries,
        "the threads that copy Q copy the first K behind it, and copies arrive when all earlier ones of the thread are "
        "complete: who waits for that K has Q",
    ),
    *(
        (
            "fence removed",
            arrives_at(ring, "fence.proxy.async", r"fence\."),
            "the MMA warp fences between its waits for Q or P and for K or V, and the product, as it must for copies: "
            "a proxy fence on the path between write and read is enough",
        )
        for ring in (P_FULL, Q_FULL)
    ),
)


def excuse(ptx: str, mutant: Mutant) -> str:
    for mutation, applies, why in EQUIVALENT:
        if mutation == mutant.mutation and applies(ptx, mutant):
            return why
    return ""
