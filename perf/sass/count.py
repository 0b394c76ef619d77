"""Counts of a kernel: emulated launches of different lengths, whose difference is a number of units of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_attn.emulator.program import program
from cute_attn.runtime import cubin as cubins
from perf.sass import clocks, lines
from perf.sass.executed import Lines, tally
from perf.sass.tools import Tools
from perf.sass.units import QUARTERS, RATES
from perf.sass.work import Roles, Work


@dataclass(frozen=True)
class Subject:
    """A compiled kernel and what runs it. `launch` emulates a problem of so many keys, recording events, and returns
    the largest error of its output; `units` says how many units of work that problem is, over all CTAs.
    """

    name: str
    arch: str
    ptx: str
    cubin: bytes
    symbol: str
    ctas: int  # of a cluster
    warps: int  # of a CTA
    roles: Roles
    work: Work
    launch: Callable[[int], float]
    units: Callable[[int], float]
    keys: int = 128  # of a tile, whose multiples are problems without a ragged end
    softmax_rows: int = 128  # query rows that meet a tile of keys together


class CountError(Exception):
    """A kernel whose executions cannot be told, or whose output is wrong."""


TOLERANCE = 0.02  # of outputs below 4 in bfloat16
SHORT, LONG = 6, 14  # tiles of keys, past the fill of any pipeline


def executed(subject: Subject, length: int) -> Lines:
    """Returns the executions of a problem of `length` keys."""
    with tally() as counts:
        error = subject.launch(length)
    if not error < TOLERANCE:
        raise CountError(f"{subject.name}: error {error} with {length} keys")
    return counts.lines(subject.ptx, subject.symbol, subject.ctas, subject.warps)


@dataclass(frozen=True)
class Counter:
    """Counts of one subject. The listing is made once. `execute` runs problems."""

    subject: Subject
    blocks: list[lines.Block]
    execute: Callable[[Subject, int], Lines] = executed

    @classmethod
    def of(cls, subject: Subject, tools: Tools, execute: Callable[[Subject, int], Lines] = executed) -> Counter:
        listing = lines.blocks(tools.listing(subject.ptx, subject.arch))
        return cls(subject, lines.without_retries(listing), execute)

    def steady(self) -> dict[str, Any]:
        """Returns the record of a unit of work that no mask touches."""
        return self.between(SHORT * self.subject.keys, LONG * self.subject.keys, self.subject.roles)

    def masked(self) -> dict[str, Any] | None:
        """Returns the record of a unit of work at the diagonal of a causal mask, None if it cannot be told.

        Where query tiles have as many rows as tiles have keys, their diagonals touch one tile each, and two with keys
        that end inside a tile: one masked step more; with half as many keys, three tiles instead of two. Rows that see
        nothing of that step begin their maximum in the next one. With all but two keys of a tile these are the first
        rows of a query tile: the warps of its last rows, on the last quarter, say what a mask costs. With one more the
        first row would see all of the tile before it, which kernels that look closely do not mask.
        """
        keys, roles = self.subject.keys, self.subject.roles
        if self.subject.softmax_rows % keys:
            return None
        return self.between(LONG * keys, (LONG + 1) * keys - 2, roles.on_quarter(QUARTERS - 1))

    def between(self, short: int, long: int, roles: Roles) -> dict[str, Any]:
        """Returns the record of a unit of work: what the problem of `long` keys executes beyond that of `short`."""
        return self.record(self.per_unit(short, long), roles)

    def unit(self, short: int, long: int) -> tuple[lines.Attributed, dict[str, Any]]:
        """Returns the opcodes of a unit of work, as `between`, and their checks."""
        return self._attributed(self.per_unit(short, long))

    def per_unit(self, short: int, long: int) -> Lines:
        """Returns the executions of PTX lines per unit of work of the problem of `long` keys beyond that of `short`."""
        subject = self.subject
        before, after = self.execute(subject, short), self.execute(subject, long)
        share = subject.ctas / (subject.units(long) - subject.units(short))
        return {line: (after[line] - before[line]) * share for line in after}

    def record(self, per_unit: Lines, roles: Roles) -> dict[str, Any]:
        """Returns the record of a unit of work that executes PTX lines so often."""
        found, checks = self._attributed(per_unit)
        return clocks.summary(found.opcodes, roles, self.subject.work, RATES[self.subject.arch]) | {"checks": checks}

    def _attributed(self, per_unit: Lines) -> tuple[lines.Attributed, dict[str, Any]]:
        found = lines.attribute(self.blocks, per_unit)
        return found, self._checks(found, per_unit)

    def slots(self, length: int) -> float:
        """Returns the issue slots of a whole problem of `length` keys, over all warps and CTAs."""
        found = lines.attribute(self.blocks, self.execute(self.subject, length))
        return float(sum(times.sum() for _, times in found.opcodes))

    def _checks(self, found: lines.Attributed, per_unit: Lines) -> dict[str, Any]:
        """Returns how far lines agree, and pairs of counts, by PTX and by SASS, that are equal if lines are mapped
        right: exponentials and matrix instructions, of all warps of a CTA."""
        ops = {i.line: i.op for b in program(self.subject.ptx, self.subject.symbol).blocks for i, _, _ in b.insts}

        def by_ptx(*prefixes: str) -> float:
            named = [line for line, op in ops.items() if op.startswith(prefixes)]
            return sum(float(per_unit[line].sum()) for line in named) / self.subject.ctas

        def by_sass(*prefixes: str) -> float:
            return sum(float(t.sum()) for op, t in found.opcodes if op.startswith(prefixes)) / self.subject.ctas

        matrix = "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "HMMA", "QMMA"
        return {
            "agreement": round(found.agreement, 4),
            "ex2": [round(by_ptx("ex2."), 3), round(by_sass("MUFU.EX2"), 3)],
            "matrix": [round(by_ptx("tcgen05.mma", "wgmma.mma", "mma.sync"), 3), round(by_sass(*matrix), 3)],
        }


def same_code(subject: Subject, tools: Tools) -> bool:
    """Tells whether ptxas makes the opcodes of the subject's own cubin, which the DSL's ptxas made."""
    own = lines.opcodes(lines.blocks(tools.disassembly(subject.cubin)))
    return own == lines.opcodes(lines.blocks(tools.listing(subject.ptx, subject.arch)))


def resources(subject: Subject) -> dict[str, int]:
    (kernel,) = cubins.read_kernels(subject.cubin)
    return {"registers": kernel.registers, "stack_bytes": kernel.stack_bytes}
