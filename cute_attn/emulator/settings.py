"""Settings of backend="emulator": `using` sets them for a block of code, CUTE_ATTN_EMULATE_ARCH for a process."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cute_attn.emulator.schedule import Schedule
from cute_attn.errors import ArgumentError

if TYPE_CHECKING:
    from cute_attn.emulator.machine import Stats

DEFAULT_ARCH = "sm_90a"


@dataclass
class Record:
    """Record of one emulated launch."""

    symbol: str
    arch: str
    grid: tuple[int, int, int]
    seconds: float
    stats: Stats
    spec: dict[str, Any]


@dataclass(frozen=True)
class Emulation:
    """Settings of an emulated GPU, and the launches so far.

    `arch`: the GPU's architecture. `checks`: check races and proxy fences too. `events`: record what a timeline needs.
    `rewrite` changes the PTX of each launch before it runs, for tests that break kernels on purpose.
    `sms`: the GPU's number of SMs, which decides how keys are split (None: the usual number for `arch`).
    `kernels`: the backend whose kernels run ("auto": the one that such a GPU would choose).
    `records`: one per launch.
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
    """The settings in force."""
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
    """Emulate `arch` ("sm_80", "sm_90a", ...) in calls with backend="emulator". Yields the settings, whose `records`
    list the launches. Raises ArgumentError for `sms` below 1."""
    if sms is not None and (type(sms) is not int or sms < 1):
        raise ArgumentError(f"sms must be None or an int >= 1, got {sms!r}")
    emulation = Emulation(arch, checks, schedule or Schedule(), events, rewrite, sms, kernels)
    token = _current.set(emulation)
    try:
        yield emulation
    finally:
        _current.reset(token)
