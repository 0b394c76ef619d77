"""Errors of the emulator. Each can name its location: kernel, CTA, warps, lane, PTX line, source line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultLocation:
    """Location of an error. `source` is empty where the PTX has no line information."""

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
    """Base class. The machine fills in `location` when an instruction raised the error."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.lane = lane
        self.warp: int | None = None
        self.location: FaultLocation | None = None

    def __str__(self) -> str:
        lane = "" if self.lane is None else f" [lane {self.lane}]"
        warp = "" if self.warp is None else f" [warp {self.warp}]"
        where = "" if self.location is None else f"\n  at {self.location}"
        return f"{self.message}{warp}{lane}{where}"


class PtxError(EmulatorError):
    """PTX text that cannot be parsed."""


class UnknownForm(EmulatorError):
    """Instruction form that is not in the registry."""


class MemoryFault(EmulatorError):
    """Access that is out of bounds, misaligned or to memory that may not be written."""


class Uninitialised(EmulatorError):
    """Read of bytes that were never written."""


class Race(EmulatorError):
    """Two unordered accesses, at least one of them a write."""


class ProxyFault(EmulatorError):
    """Missing proxy fence between the generic and the async proxy."""


class BarrierFault(EmulatorError):
    """Misuse of an mbarrier or a named barrier."""


class RegisterFault(EmulatorError):
    """Use of a register that an operation in flight owns, or more registers than a CTA has."""


class Divergence(EmulatorError):
    """Warp-wide instruction that some of the lanes it names do not reach."""


class Deadlock(EmulatorError):
    """State in which no warp can make progress."""


class LaunchFault(EmulatorError):
    """Launch parameters that the architecture or the kernel does not accept."""
