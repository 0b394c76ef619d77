"""What the DSL's ptxas says of instructions, given as lines of inline PTX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cutlass import Int64, cute

from cute_attn.kernels.blocks.program import GridProgram
from cute_attn.kernels.blocks.ptx import asm
from cute_attn.runtime import compile as compiler

# What lines may use. The registers stay undefined: nothing runs.
HEAD = (
    "{ .reg .b32 r<160>; .reg .b64 l<8>; .reg .b16 h<4>; .reg .b8 c<4>; .reg .b128 w<2>; .reg .f32 f<8>; "
    ".reg .pred p, q; mov.b64 l0, $0; mov.b32 r0, 0;"
)


class Params(NamedTuple):
    out: Int64


class _Lines(GridProgram):
    params = Params
    block = (128, 1, 1)

    def __init__(self, text: str) -> None:
        self.text = text

    @cute.kernel
    def kernel(self, p: Params) -> None:
        asm(self.text, [], [p.out])


def refused(lines: Sequence[str], arch: str) -> set[int]:
    """Indices of the lines that ptxas refuses for `arch`. The others are compiled to machine code: those of tcgen05 for
    pairs of CTAs, and all the rest, because a kernel must not mix pairs and single CTAs."""
    start, *named = sorted(_errors([f"{HEAD} tcgen05.no_such;", *lines, "}"], arch))  # marks where the lines begin
    found = {line - start - 1 for line in named}
    kept = [line for i, line in enumerate(lines) if i not in found]
    pairs = [line for line in kept if line.startswith("tcgen05") and ".cta_group::2" in line]
    for together in (pairs, [line for line in kept if line not in pairs]):
        if _errors([HEAD, *together, "}"], arch):
            raise AssertionError(f"ptxas takes lines for {arch} that it then does not compile")
    return found


def _errors(lines: Sequence[str], arch: str) -> set[int]:
    """Lines of the PTX file that ptxas names."""
    try:
        compiler._compile(_Lines("\n".join(lines)), "cute_attn_lines", arch)
    except Exception as err:
        found = {int(number) for number in re.findall(r"line (\d+);\s+error", str(err))}
        if not found:
            raise
        return found
    return set()
