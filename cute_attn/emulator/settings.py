"""What is emulated where nobody says otherwise: `using` for a stretch of code, CUTE_ATTN_EMULATE_ARCH for a process."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cute_attn.emulator.machine import Schedule, Stats

DEFAULT_ARCH = "sm_90a"


@dataclass
class Record:
    """One launch that was emulated."""

    symbol: str
    arch: str
    grid: tuple[int, int, int]
    seconds: float
    stats: Stats
    spec: dict[str, Any]


@dataclass(frozen=True)
class Emulation:
    """`arch`: the GPU that is stood in for. `records` collects what ran. `events`: keep what a timeline needs.
    `kernels`: the backend whose kernels run ("auto": the one that such a GPU would choose).
    `sms`: its multiprocessors, which decide how keys are split (None: as many as such a GPU has).
    `rewrite` changes the PTX of each launch before it runs: for tests that break kernels on purpose.
    """

    arch: str
    checks: bool = True
    schedule: Schedule = field(default_factory=Schedule)
    events: bool = False
    rewrite: Callable[[str], str] | None = None
    sms: int | None = None
    kernels: str = "auto"
    records: list[Record] = field(default_factory=list)


_current: contextvars.ContextVar[Emulation | None] = contextvars.ContextVar("emulation", default=None)


def current() -> Emulation:
    found = _current.get()
    return Emulation(os.environ.get("CUTE_ATTN_EMULATE_ARCH", DEFAULT_ARCH)) if found is None else found


@contextlib.contextmanager
def using(
    arch: str,
    *,
    checks: bool = True,
    schedule: Schedule | None = None,
    events: bool = False,
    rewrite: Callable[[str], str] | None = None,
    sms: int | None = None,
    kernels: str = "auto",
) -> Iterator[Emulation]:
    """Emulate `arch` ("sm_80", "sm_90a", ...) in calls with backend="emulator"; yields the launches' records."""
    emulation = Emulation(arch, checks, schedule or Schedule(), events, rewrite, sms, kernels)
    token = _current.set(emulation)
    try:
        yield emulation
    finally:
        _current.reset(token)
