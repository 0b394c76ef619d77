"""The registry of instruction forms.

A form is a template of opcodes and a function that writes the Python of one instruction. In a template `{.s32|.u32}` is
a choice and `{|.ftz}` an option; every combination is one opcode, and the choices are handed to the function:

    @form("add{.s32|.u32}")
    def add(e: Emitter, inst: Inst, kind: str) -> None:
        d, a, b = inst.operands
        e.set(d, tag(kind), f"{e.get(a, tag(kind))} + {e.get(b, tag(kind))}")

An opcode that no template yields is an error that names it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_attn.emulator.errors import UnknownForm

Build = Callable[..., None]


@dataclass(frozen=True)
class Form:
    """`since`: the least architecture number. `feature`: "a" if only the arch-specific targets (sm_90a) have it.

    `conformance`: how far its result is defined: "exact" (bit for bit), "approx" (an ulp bound), "order" (no values of
    its own). `golden`: the family of micro-kernels that holds it against hardware, "" if none does.
    `converges`: all lanes that a warp has alive must be here. `solo`: stands in a block of its own, may wait or split.
    """

    template: str
    build: Build
    since: int = 80
    only: tuple[int, ...] = ()
    conformance: str = "exact"
    golden: str = ""
    converges: bool = False
    solo: bool = False


FORMS: list[Form] = []
_BY_OPCODE: dict[str, tuple[Form, tuple[str, ...]]] = {}
_GROUP = re.compile(r"\{([^}]*)\}")


def form(*templates: str, **traits: Any) -> Callable[[Build], Build]:
    """Register the decorated function for every opcode of the templates. Traits are fields of `Form`."""

    def register(build: Build) -> Build:
        for template in templates:
            entry = Form(template, build, **traits)
            FORMS.append(entry)
            for opcode, choices in expand(template):
                if opcode in _BY_OPCODE:
                    raise ValueError(f"{opcode} is in {_BY_OPCODE[opcode][0].template} and in {template}")
                _BY_OPCODE[opcode] = entry, choices
        return build

    return register


def expand(template: str) -> list[tuple[str, tuple[str, ...]]]:
    """Every opcode of a template, with the choices that make it."""
    groups = [group.split("|") for group in _GROUP.findall(template)]
    pieces = _GROUP.split(template)[::2]
    found = []
    for choices in itertools.product(*groups):
        opcode = "".join(itertools.chain.from_iterable(zip(pieces, (*choices, ""), strict=True)))
        found.append((opcode, choices))
    return found


def lookup(opcode: str, arch: int) -> tuple[Form, tuple[str, ...]]:
    """The form of an opcode on sm_<arch>. UnknownForm names it."""
    found = _BY_OPCODE.get(opcode)
    if found is None:
        raise UnknownForm(f"the emulator does not know the instruction form {opcode}")
    entry = found[0]
    if arch < entry.since or (entry.only and arch not in entry.only):
        raise UnknownForm(f"{opcode} does not exist on sm_{arch}")
    return found


def opcodes() -> list[str]:
    return list(_BY_OPCODE)
