"""Description of a fault."""

from __future__ import annotations

from dataclasses import dataclass


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


Tests = tuple[str, ...]
Table = dict[Tests, dict[str, dict[str, tuple[str, ...]]]]  # tests: {file: {what: (old, new) or (old, new, excuse)}}


def listed(*tables: Table) -> tuple[Fault, ...]:
    return tuple(
        Fault(what, file, old, new, tests, *excuse)
        for table in tables
        for tests, files in table.items()
        for file, faults in files.items()
        for what, (old, new, *excuse) in faults.items()
    )


def chosen(file: str, words: str) -> Tests:
    """Returns the arguments of pytest that run the tests of a file selected by `-k words`."""
    return f"tests/emulator/test_{file}.py", "-k", words


IN_STEP = "the emulator runs the lanes of a warp in lockstep, which a GPU need not do"
