"""Mutants that no check can notice, because they break nothing: which they are, and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from tests.emulator.mutations import WAIT, Mutant, sites


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
    at = mutant.place(ptx)
    return at.group().endswith("keep;") and re.findall(r"setp\.ne\.s32 keep, (\S+), 0;", ptx[: at.start()])[-1] == "1"


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


def before(ptx: str, mutant: Mutant, pattern: str) -> bool:
    """Whether `pattern` is what comes next, of barriers, products, copies and loads, behind a wait or fence of latent
    attention on wgmma."""
    if not mutant.kernel.startswith("cute_attn_mla_wgmma"):
        return False
    step = re.compile(r"(?<![\w.])(?:mbarrier|wgmma|bar|cp|ld)\.[\w.:]+").search(ptx, mutant.place(ptx).end())
    return step is not None and re.match(pattern, step[0]) is not None


GATHERS = "cp.async.cg.shared.global"  # in the Hopper kernel for small pages


def brought_with_v(ptx: str, mutant: Mutant) -> bool:
    """Whether a Blackwell kernel that gathers waits for K between the products of the V before it."""
    waits = sites(ptx, WAIT)[max(mutant.site - 1, 0) : mutant.site + 1]
    between = ptx[waits[0].end() : waits[-1].start()]
    gathers = mutant.kernel.startswith("cute_attn_fa4") and GATHERS in ptx
    return gathers and ", keep;" in between and "tcgen05.commit" not in between


UMMA = "cute_attn_xqa_umma"
# Barriers of decode on tcgen05 from the last one that is initialised: of the first slots.
P_FULL, Q_FULL = -5, -9
COPIED = "64"  # arrivals where the producers' copies fill a slot


def at_barrier(ptx: str, register: str, which: int, arrivals: str = "") -> bool:
    """Whether a register has the address of a barrier of decode on tcgen05, or of the first slot of its ring and the
    distance to another one, in a kernel where it takes so many arrivals, if that matters.
    """
    inits = re.findall(r"add\.s32\s+%r\d+, %r\d+, (\d+);\s*(?://.*\s*)?mbarrier\.init\S+ \[%r\d+\], (\d+);", ptx)
    found = re.findall(rf"add\.s32\s+{re.escape(register)}, %r\d+, (\d+);", ptx)
    return len(inits) >= -Q_FULL and found == [inits[which][0]] and arrivals in ("", inits[which][1])


def waits_for_copied_queries(ptx: str, mutant: Mutant) -> bool:
    """Whether a warp of decode on tcgen05 waits for Q that the producers copy."""
    register = re.search(r"\[(%r\d+)\]", mutant.text)
    return mutant.kernel.startswith(UMMA) and register is not None and at_barrier(ptx, register[1], Q_FULL, COPIED)


def arrives_full(ptx: str, mutant: Mutant) -> bool:
    """Whether a proxy fence of decode on tcgen05 precedes an arrival at a full barrier of P or Q."""
    if not mutant.kernel.startswith(UMMA) or "fence.proxy.async" not in mutant.text:
        return False
    following = re.compile(r"mbarrier\.[^;]*;|tcgen05\.[^;]*;").search(ptx, mutant.place(ptx).end())
    arrival = following and re.fullmatch(r"mbarrier\.arrive\.\S+ _, \[(%r\d+)\];", following[0])
    return bool(arrival) and any(at_barrier(ptx, arrival[1], ring) for ring in (P_FULL, Q_FULL))


def precedes_a_barrier(ptx: str, mutant: Mutant) -> bool:
    """Whether a barrier of the planner behind reads of all warps' sums has another one before the next sums."""
    if not mutant.kernel.startswith("cute_attn_plan"):
        return False
    at = mutant.place(ptx)
    before, after = ptx[: at.start()].rpartition("bar.sync")[2], ptx[at.end() :].partition("bar.sync")[0]
    return "ld.shared.b64" in before and "shfl.sync.idx" in before and "st.shared.b64" not in after


# Survivors that break nothing: mutations, what identifies the site, why.
EQUIVALENT: tuple[tuple[str, Callable[[str, Mutant], bool], str], ...] = (
    ("barrier removed", precedes_a_barrier, "another barrier comes before the next sums, which overwrite those read"),
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
    (
        "wait for copies removed, wait for copies one group late",
        lambda ptx, mutant: (
            mutant.kernel.startswith("cute_attn_xqa") and mutant.site == len(sites(ptx, r"cp\.async\.wait_group")) - 1
        ),
        "at the end all groups are empty: the last steps of a segment start no copies",
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
    (
        "mbarrier wait removed, fence removed",
        lambda ptx, mutant: before(ptx, mutant, r"bar\.sync"),
        "of the other warpgroup's tile: that one waited for both halves, and fenced, before it left the P for which "
        "this one waits next",
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
            "e4m3x2" in ptx and before(ptx, mutant, r"wgmma\.fence") and "wgmma.mma" in ptx[: mutant.place(ptx).start()]
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
            (at := mutant.place(ptx).start()) < ptx.find("griddepcontrol.wait") and "tcgen05.st" not in ptx[:at]
        ),
        "no asynchronous operation in tensor memory precedes: the allocation is complete when the warp goes on",
    ),
    (
        "tensor memory fence removed",
        lambda ptx, mutant: mutant.place(ptx).start() > ptx.rfind("mbarrier."),
        "at the end no operation is outstanding: fences and waits of the last hand-overs have ordered all before the "
        "deallocation, which is not asynchronous",
    ),
    (
        "mbarrier wait removed",
        waits_for_copied_queries,
        "the threads that copy Q copy the first K behind it, and copies arrive when all earlier ones of the thread are "
        "complete: who waits for that K has Q",
    ),
    (
        "fence removed",
        arrives_full,
        "the MMA warp fences between its waits for Q or P and for K or V, and the product, as it must for copies: a "
        "proxy fence on the path between write and read is enough",
    ),
)


def excuse(ptx: str, mutant: Mutant) -> str:
    """Why a mutant is equivalent, or ""."""
    of_mutation = (row for row in EQUIVALENT if mutant.mutation in row[0].split(", "))
    return next((why for _, applies, why in of_mutation if applies(ptx, mutant)), "")
