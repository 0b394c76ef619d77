"""Compares the forms of softmax of the Blackwell kernel by executed machine code, without a GPU:
`python -m perf.softmax_forms --head-dim 64 128 --scores normal realistic leaps`.

Every tile of the table of 16-bit dtypes runs with both forms (`softmax` of `BlackwellTile`), with its own share of
polynomials and without any, on scores of several kinds: a whole request on the emulator, less its first 128 keys, whose
maximum both forms search. What events that are rare cost is in the average. Method, rates and caveats are those of
`perf.model`: docs/kernels/fa4_model.md. It needs the same two programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_attn.kernels.fa4 import tiles
from cute_attn.kernels.fa4.spec import SOFTMAX_FORMS, BlackwellTile
from perf.bench import publish, save
from perf.harness import reason
from perf.machine import command_line, environment
from perf.model import head_dims, title
from perf.sass import ours, rescales
from perf.sass.count import Counter, resources
from perf.sass.score_kinds import KINDS, exponents
from perf.sass.tools import ToolError, Tools, find
from perf.sass.units import RATES
from perf.sass.work import STEP

BACKEND = "fa4"
KV_LEN = 2048


class Kernel(NamedTuple):
    """Kernel to count: the tile of a head dimension."""

    dims: tuple[int, int]
    tile: BlackwellTile

    @property
    def name(self) -> str:
        """Name of the row of the table, form and share of polynomials."""
        return f"{self.row} {self.tile.softmax} {self.tile.polynomial}/16"

    @property
    def row(self) -> str:
        """Name of the row of the table."""
        pair = ", 2 CTA" if self.tile.ctas == 2 else ""
        narrow = f", {self.tile.cols} keys" if self.tile.cols < STEP else ""
        return f"{title(self.dims)}{pair}{narrow}"


def kernels(arch: str, dims: tuple[int, int], forms: Sequence[str]) -> Iterator[tuple[Kernel | str, str]]:
    """Yields the kernels of a head dimension, or the name of one that cannot be, and why it cannot."""
    for tile in tiles.candidates(arch)[dims]:
        for polynomial in dict.fromkeys((tile.polynomial, 0)):
            for form in forms:
                base = Kernel(dims, dataclasses.replace(tile, polynomial=polynomial))
                try:
                    yield base._replace(tile=dataclasses.replace(base.tile, softmax=form)), ""
                except ValueError as error:
                    yield f"{base.row} {form} {polynomial}/16", str(error).rpartition(": ")[2]


@dataclasses.dataclass(frozen=True)
class CountedKernel:
    """Kernel that is counted on several kinds of scores."""

    kernel: Kernel
    counter: Counter
    kv_len: int
    seeds: Sequence[int]

    @classmethod
    def of(cls, kernel: Kernel, options: argparse.Namespace, tools: Tools) -> CountedKernel:
        fields = dataclasses.asdict(kernel.tile)
        subject = ours.subject(BACKEND, options.arch, kernel.dims, causal=False, tile_fields=fields)
        return cls(kernel, Counter.of(subject, tools), options.kv_len, range(1, options.seeds + 1))

    def record(self) -> dict[str, Any]:
        """Returns what is true of the kernel on any scores."""
        tile = dataclasses.asdict(self.kernel.tile)
        return {"name": self.kernel.name, "tile": tile, **resources(self.counter.subject)}

    def row(self, kind: str) -> dict[str, Any]:
        """Returns the record of a tile step on scores of this kind."""
        errors: list[float] = []
        subject, tile = self.counter.subject, self.kernel.tile
        counted = dataclasses.replace(
            subject,
            launch=lambda keys: self._launch(kind, keys, errors),
            units=lambda keys: len(self.seeds) * subject.units(keys),
        )
        counter = dataclasses.replace(self.counter, subject=counted)
        per_unit = counter.per_unit(STEP, self.kv_len)
        found = counter.record(per_unit, subject.roles)
        math_warps = [warp for role in subject.roles.math for warp in subject.roles.warps[role]]
        columns = self.kernel.dims[1]
        by_rule = [self._by_rule(kind, seed) for seed in self.seeds]
        return {
            "kernel": self.kernel.name,
            "row": self.kernel.row,
            "form": tile.softmax,
            "polynomial": tile.polynomial,
            "scores": kind,
            "clocks": found["clocks"],
            "binds": found["binds"],
            "slots": {role: found["slots"][role]["all"] for role in subject.roles.warps if role in found["slots"]},
            "rescales": round(rescales.executed(subject.ptx, subject.symbol, per_unit, math_warps, columns), 4),
            "rescales_by_rule": round(sum(x.warps for x in by_rule) / len(by_rule), 4),
            "moved_rows": round(sum(x.rows for x in by_rule) / len(by_rule), 4),
            "error": max(errors),
            "checks": found["checks"],
        }

    def _operands(self, kind: str, seed: int, keys: int) -> ours.Operands:
        rows = round(self.counter.subject.units(STEP) * STEP)
        return KINDS[kind].operands(rows, self.kv_len, self.kernel.dims, seed, keys)

    def _launch(self, kind: str, keys: int, errors: list[float]) -> float:
        fields = dataclasses.asdict(self.kernel.tile)
        for seed in self.seeds:
            operands = self._operands(kind, seed, keys)
            errors.append(ours.emulate(BACKEND, self.counter.subject.arch, operands, False, fields))
        return max(errors)

    def _by_rule(self, kind: str, seed: int) -> rescales.Rescales:
        q, k, _ = self._operands(kind, seed, self.kv_len)
        return rescales.RULES[self.kernel.tile.softmax](exponents(q, k), self.kernel.tile.cols)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.softmax_forms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=head_dims,
        default=list(tiles.HEAD_DIMS),
        metavar="D",
        help="head dimensions of the tile table, as 128 or 192/128 (default: all)",
    )
    parser.add_argument("--forms", nargs="+", choices=SOFTMAX_FORMS, default=list(SOFTMAX_FORMS), help="default: both")
    parser.add_argument("--scores", nargs="+", choices=list(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument("--arch", choices=tiles.ARCHS, default=tiles.ARCHS[0], help=f"default: {tiles.ARCHS[0]}")
    parser.add_argument(
        "--kv-len", type=int, default=KV_LEN, help=f"keys, a multiple of {STEP}, at least two (default {KV_LEN})"
    )
    parser.add_argument("--seeds", type=int, default=1, help="requests per kind of scores (default 1)")
    parser.add_argument("--tools", type=Path, help="folder where nvidia-cuda-nvcc and nvidia-cuda-nvdisasm are")
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every kernel")
    options = parser.parse_args(argv)
    if unknown := [title(dims) for dims in options.head_dim if dims not in tiles.HEAD_DIMS]:
        parser.error(f"--head-dim must be of the table ({', '.join(map(title, tiles.HEAD_DIMS))}), got {unknown}")
    if options.kv_len % STEP or options.kv_len < 2 * STEP:
        parser.error(f"--kv-len must be a multiple of {STEP}, at least {2 * STEP}, got {options.kv_len}")
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options, start = parse(argv), time.monotonic()
    try:
        tools = find(options.tools)
    except ToolError as error:
        print(error, file=sys.stderr)
        return 2
    record: dict[str, Any] = {
        "command": command_line("softmax_forms", sys.argv[1:] if argv is None else argv),
        "environment": {**environment(), **tools.versions()},
        "rates": {options.arch: dataclasses.asdict(RATES[options.arch])},
        "kernels": [],
        "softmax_forms": [],
        "failed_rows": {},
    }
    for dims in options.head_dim:
        for kernel, refused in kernels(options.arch, dims, options.forms):
            if isinstance(kernel, str):
                record["failed_rows"][kernel] = refused
            else:
                count(kernel, options, tools, record)
            record["seconds"] = round(time.monotonic() - start)
            if options.out:
                save(record, options.out)
    publish(record, options.out)
    return 0


def count(kernel: Kernel, options: argparse.Namespace, tools: Tools, record: Mapping[str, Any]) -> None:
    """Adds the rows of a kernel to a record, or the reasons why they are missing."""
    try:
        counted = CountedKernel.of(kernel, options, tools)
    except Exception as error:  # a kernel that does not compile must not end the run
        record["failed_rows"][kernel.name] = reason(error)
        print(kernel.name, record["failed_rows"][kernel.name], file=sys.stderr, flush=True)
        return
    record["kernels"].append(counted.record())
    for kind in options.scores:
        name = f"{kernel.name} {kind}"
        try:
            record["softmax_forms"].append(counted.row(kind))
        except Exception as error:  # a wrong result likewise
            record["failed_rows"][name] = reason(error)
        print(name, record["failed_rows"].get(name, ""), file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
