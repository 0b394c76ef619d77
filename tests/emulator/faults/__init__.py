"""Faults of our kernels: each changes one place of their sources and names the tests that must detect it.

`inject` puts them into a copy of the project and runs these tests there. The files beside this one hold them by topic,
as patches of whole lines:

    === a file of tests, which must detect what follows, and behind -k words that choose some of them
    --- a file of cute_attn/kernels
    @@ what is wrong
    ! why no test can detect it, if none can
     a line around the place, which occurs once in the file
    -a line of today
    +the line in its place
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOPICS = ("hopper", "pages", "fp8", "blackwell", "xqa", "latent", "combine", "head_dims")


@dataclass(frozen=True)
class Fault:
    """Replaces `old`, which occurs once in `file` of `cute_attn/kernels`, by `new`. `tests` are arguments of pytest;
    `excuse` says why none of them can detect the fault.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    excuse: str = ""


def parsed(text: str) -> Iterator[Fault]:
    """The faults of a topic, in their order."""
    tests: tuple[str, ...] = ()
    file = ""
    for block in re.split(r"^(?=(?:===|---|@@) )", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.splitlines()
        kind, _, name = head.partition(" ")
        if kind == "===":
            tests = tuple(re.split(r" (-k) ", name))
        elif kind == "---":
            file = name
        else:
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line.startswith((" ", sign))) for sign in "-+")
            excuse = "".join(line[2:] for line in lines if line.startswith("! "))
            yield Fault(name, file, old, new, tests, excuse)


FAULTS = tuple(fault for topic in TOPICS for fault in parsed(Path(__file__).with_name(f"{topic}.diff").read_text()))
