"""Registry of instruction forms.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cute_attn.emulator.emit import Emitter
from cute_attn.emulator.errors import UnknownForm
from cute_attn.emulator.ptx import Inst

Build = Callable[..., None]
Run = TypeVar("Run", bound=Callable[..., Any])


@dataclass(frozen=True)
class Form:
    """Instruction form. `since`: the first architecture that has it. `only`: the architectures that have it, if not all
    from there on. Those from sm_100 on are read from the ISA alone, never compared with a GPU; some of their opcodes
    occur in published kernels that come out right (`EXERCISED` in tests/emulator/test_corpus.py).

    `converges`: all live lanes of a warp must execute it together. `aligned`: all 32 lanes must, and what a report
    calls it. `solo`: it gets a block of its own, and may wait or split the batch.
    """

    build: Build
    since: int = 80
    only: tuple[int, ...] = ()
    converges: bool = False
    aligned: str = ""
    solo: bool = False


FORMS: dict[str, tuple[Form, tuple[str, ...]]] = {}
"""Form and choices by opcode."""


def form(*templates: str, **traits: Any) -> Callable[[Build], Build]:
    """Register the decorated function for every opcode of the templates. Traits are fields of `Form`."""

    def register(build: Build) -> Build:
        entry = Form(build, **traits)
        for opcode, choices in itertools.chain.from_iterable(map(expand, templates)):
            if opcode in FORMS:
                raise ValueError(f"{opcode} has two forms")
            FORMS[opcode] = entry, choices
        return build

    return register


def expand(template: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every opcode of a template, with its choices."""
    pieces = re.split(r"\{([^}]*)\}", template)
    for choices in itertools.product(*(group.split("|") for group in pieces[1::2])):
        yield "".join(itertools.chain(*zip(pieces[::2], (*choices, ""), strict=True))), choices


def computed(
    functions: Mapping[str, str | Callable[..., Any]],
    *,
    compute: Callable[..., None] = Emitter.compute,
    kinds: Mapping[str, str] = {},
    **traits: Any,
) -> None:
    """Register forms that compute one value of others: functions or patterns by template, and what emits them, with
    `kinds` of operands and results that are not of the type that the opcode ends with.
    """

    def register(function: str | Callable[..., Any]) -> Build:
        def build(e: Emitter, inst: Inst, *choices: str) -> None:
            compute(e, inst, function, **kinds)

        return build

    for template, function in functions.items():
        form(template, **traits)(register(function))


def called(*templates: str, operands: str = "", results: str = "", **traits: Any) -> Callable[[Run], Run]:
    """Register forms that call the decorated function of a warp batch, a mask and `operands`. Kinds of operands:

    - `u4`: the value as this type; `.`: as the type that the opcode ends with, `^`: as the one before; `u4=0`: with a
      default; `#`: a number
    - `{u4}`: the values of a vector
    - `[u4]`, `[u8]`: an address in shared, in global memory; `[*]`: in that which the opcode names; `[]`: in shared
      memory, generic where the opcode names no space; `[u8]{i4}`: the address of a tensor map, and coordinates
    - `?`: what may be there and has no effect. Policies of the L2 cache are left out.
    - `$0`: no operand, but the first choice of the template; `$op`: the opcode; `$type`: the type that it ends with;
      `$items`: the number of results

    `results`: the types of what it returns, for the first operand, or for the parts of a pair; `{u4}`: for all items.
    """

    def register(function: Run) -> Run:
        def build(e: Emitter, inst: Inst, *choices: str) -> None:
            e.apply(inst, function, choices, operands, results)

        form(*templates, **traits)(build)
        return function

    return register


def lookup(opcode: str, arch: int) -> tuple[Form, tuple[str, ...]]:
    """Look up the form of an opcode on sm_<arch>, with its choices. Raises UnknownForm."""
    found = FORMS.get(opcode)
    if found is None:
        raise UnknownForm(f"the emulator does not know the instruction form {opcode}")
    entry = found[0]
    if arch < entry.since or (entry.only and arch not in entry.only):
        raise UnknownForm(f"{opcode} does not exist on sm_{arch}")
    return found
