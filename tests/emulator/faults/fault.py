"""What a fault is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in a file of `cute_attn/kernels`, becomes `new`. `tests`: arguments of pytest. `excuse`:
    why none of them can notice.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    excuse: str = ""


def chosen(file: str, words: str) -> tuple[str, ...]:
    return f"tests/emulator/test_{file}.py", "-k", words


IN_STEP = "the lanes of a warp go in step on the emulator; on a GPU they need not"
