"""Mutations of PTX: what is removed or altered, and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


def _removed(text: str) -> str:
    """An instruction that does nothing on the emulator, in the place of another one."""
    return "griddepcontrol.launch_dependents;"


def _plus(amount: int) -> Callable[[str], str]:
    """The last number of an instruction, changed."""

    def change(text: str) -> str:
        return re.sub(r"(\d+)(\s*;)$", lambda m: f"{int(m[1]) + amount}{m[2]}", text)

    return change


def _moved(bytes_or_columns: int) -> Callable[[str], str]:
    """The address of an instruction, moved."""

    def change(text: str) -> str:
        return re.sub(
            r"\[(%\w+)(?:\+(\d+))?\]", lambda m: f"[{m[1]}+{int(m[2] or 0) + bytes_or_columns}]", text, count=1
        )

    return change


def _flipped(bit: int) -> Callable[[str], str]:
    """A bit of the last number, inverted."""

    def change(text: str) -> str:
        return re.sub(r"(\d+)(\}?\s*;)$", lambda m: f"{int(m[1]) ^ 1 << bit}{m[2]}", text)

    return change


def _always(text: str) -> str:
    """A product that adds to what is there."""
    return re.sub(r", (?:zero|keep);$", ", one;", text)


def _in_cta(rank: int) -> Callable[[str], str]:
    """A commit that arrives in one CTA of a pair."""
    return lambda text: text.replace("m, 3;", f"m, {1 << rank};")


def _passed(text: str) -> str:
    """A wait that always succeeds at once."""
    predicate = text.split(None, 1)[1].split(",")[0]
    return f"setp.eq.u32 {predicate}, 0, 0;"


WAIT = r"mbarrier\.try_wait|mbarrier\.test_wait"
ACCUMULATES = r"@e tcgen05\.mma[^;]*, (?:zero|keep)"
PAIR_COMMIT = r"mov\.b16 m, 3;[^;]*;\s*@e tcgen05\.commit\.cta_group::2"
INSTRUCTION = r"mov\.b32 w, \d+"  # descriptor of tcgen05.mma

# What it is called: instructions that it applies to, what becomes of them.
MUTATIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "barrier removed": (r"bar(?:rier)?(?:\.cta)?\.sync(?!\.)", _removed),
    "arrival at a barrier removed": (r"bar\.arrive", _removed),
    "wait for copies removed": (r"cp\.async\.wait_group", _removed),
    "wait for copies one group late": (r"cp\.async\.wait_group", _plus(1)),
    "commit of copies removed": (r"cp\.async\.commit_group", _removed),
    "wait for earlier launches removed": (r"griddepcontrol\.wait", _removed),
    "mbarrier wait removed": (WAIT, _passed),
    "mbarrier arrival removed": (r"mbarrier\.arrive(?!\.expect_tx)", _removed),
    "mbarrier count one too high": (r"mbarrier\.init", _plus(1)),
    "16 bytes too many expected": (r"mbarrier\.arrive\.expect_tx", _plus(16)),
    "16 bytes too few expected": (r"mbarrier\.arrive\.expect_tx", _plus(-16)),
    "fence removed": (r"fence\.", _removed),
    "wgmma fence removed": (r"wgmma\.fence", _removed),
    "wgmma wait removed": (r"wgmma\.wait_group", _removed),
    "wgmma wait one group late": (r"wgmma\.wait_group", _plus(1)),
    "wgmma commit removed": (r"wgmma\.commit_group", _removed),
    "wait for bulk stores removed": (r"cp\.async\.bulk\.wait_group", _removed),
    "cluster barrier removed": (r"barrier\.cluster\.wait", _removed),
    "tensor memory fence removed": (r"tcgen05\.fence", _removed),
    "wait for tensor memory loads removed": (r"tcgen05\.wait::ld", _removed),
    "wait for tensor memory stores removed": (r"tcgen05\.wait::st", _removed),
    "commit of products removed": (r"@e tcgen05\.commit", _removed),
    "commit to the next barrier": (r"@e tcgen05\.commit", _moved(8)),
    "commit in the leader alone": (PAIR_COMMIT, _in_cta(0)),
    "commit in the other CTA alone": (PAIR_COMMIT, _in_cta(1)),
    "16 columns off": (r"tcgen05\.(?:ld|st)", _moved(16)),
    "first product accumulates": (ACCUMULATES, _always),
    "instruction descriptor with another N": (INSTRUCTION, _flipped(17)),
    "instruction descriptor with another M": (INSTRUCTION, _flipped(24)),
    "instruction descriptor with another order of B": (INSTRUCTION, _flipped(16)),
    "matrix descriptor with another stride": (r"mov\.b64 %\w+, \{%\w+, (?:1073|2147)\d+\}", _flipped(5)),
    "deallocation removed": (r"tcgen05\.dealloc", _removed),
}


@dataclass(frozen=True)
class Mutant:
    """The `site`-th place of a kernel that a mutation applies to."""

    kernel: str  # prefix of the symbol
    mutation: str
    site: int
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}, {self.mutation}, line {self.line}: {self.text}"

    def place(self, ptx: str) -> re.Match[str]:
        """Where it is in the PTX of its kernel."""
        return sites(ptx, MUTATIONS[self.mutation][0])[self.site]


def sites(ptx: str, pattern: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<![\w.])(?:{pattern})[^;]*;", ptx))


def mutants(kernel: str, ptx: str) -> Iterator[Mutant]:
    for name, (pattern, _) in MUTATIONS.items():
        for i, match in enumerate(sites(ptx, pattern)):
            yield Mutant(kernel, name, i, ptx[: match.start()].count("\n") + 1, " ".join(match.group().split()))


def applied(mutant: Mutant, ptx: str) -> str:
    match = mutant.place(ptx)
    changed = MUTATIONS[mutant.mutation][1](match.group())
    assert changed != match.group(), mutant
    return ptx[: match.start()] + changed + ptx[match.end() :]
