"""What the emulator raises. Every error can say where: kernel, CTA, warps, lanes, PTX line, source line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where an error came up. `source` is empty where the PTX has no line information."""

    kernel: str
    cta: tuple[int, int, int]
    warps: tuple[int, ...]
    line: int  # of the PTX text, from 1
    text: str  # the instruction
    source: str

    def __str__(self) -> str:
        warps = ",".join(map(str, self.warps))
        source = f" ({self.source})" if self.source else ""
        return f"{self.kernel} CTA {self.cta} warp {warps}, PTX line {self.line}{source}: {self.text}"


class EmulatorError(Exception):
    """Base class. `place` is filled in by the machine where an instruction raised."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.lane = lane
        self.warp: int | None = None
        self.place: Place | None = None

    def __str__(self) -> str:
        lane = "" if self.lane is None else f" [lane {self.lane}]"
        warp = "" if self.warp is None else f" [warp {self.warp}]"
        where = "" if self.place is None else f"\n  at {self.place}"
        return f"{self.message}{warp}{lane}{where}"


class PtxError(EmulatorError):
    """The PTX text cannot be read."""


class UnknownForm(EmulatorError):
    """An instruction form that the registry does not have."""


class MemoryFault(EmulatorError):
    """Out of bounds, misaligned, not writable."""


class Uninitialised(EmulatorError):
    """A read of bytes that nobody wrote."""


class Race(EmulatorError):
    """Two accesses that nothing orders, one of them a write."""


class ProxyFault(EmulatorError):
    """Generic writes reach the async proxy without a proxy fence, or the reverse."""


class BarrierFault(EmulatorError):
    """Misuse of an mbarrier or a named barrier."""


class Divergence(EmulatorError):
    """A warp-wide instruction without all the lanes that it names."""


class Deadlock(EmulatorError):
    """Nothing can move."""


class LaunchFault(EmulatorError):
    """Launch parameters that the architecture or the kernel does not take."""
