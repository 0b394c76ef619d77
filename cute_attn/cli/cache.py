"""`cache`: shows, verifies and clears the cache of compiled kernels."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from cute_attn.cli.terminal import ProgressBar, format_bytes, printable, table
from cute_attn.runtime import arch as archs
from cute_attn.runtime import cache

HEADER = ("arch", "family", "kernels", "size", "current")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="show, verify and clear the cache of compiled kernels",
        description=(
            "show (default): number and size of cached kernels by architecture and family; `current` are those of the "
            "present kernel sources and DSL, which alone are used. verify: exits 1 if a file is damaged or not "
            "private. clear: removes kernels, with --yes; without it, says what would be removed. Nobody knows "
            "what a damaged file was: it is always among those named. Nor what a file is that is not read because "
            "others may write it: clear removes it only without --arch, --family and --stale."
        ),
    )
    parser.add_argument("action", nargs="?", choices=("show", "verify", "clear"), default="show")
    parser.add_argument("--arch", metavar="ARCH", help=f"only of this architecture: one of {', '.join(archs.ARCHS)}")
    parser.add_argument("--family", metavar="NAME", help="only of this family: fa2, fa3, xqa, combine, ...")
    parser.add_argument("--stale", action="store_true", help="only those of other kernel sources or another DSL")
    parser.add_argument("--yes", action="store_true", help="clear: remove them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    found = selected(options)
    damaged = [entry for entry in found if entry.problem]
    removed = options.action == "clear" and options.yes
    if removed:
        cache.remove(found)
    if options.json:
        document = {
            "directory": str(cache.directory()),
            "kernels": len(found),
            "bytes": sum(entry.num_bytes for entry in found),
            "groups": [dict(zip(HEADER, row, strict=True)) for row in groups(found)],
            "damaged": [{"file": str(entry.path), "problem": entry.problem} for entry in damaged],
            "removed": removed,
        }
        print(json.dumps(document, indent=1))
        return 1 if damaged and options.action == "verify" else 0
    print(report(found))
    for entry in damaged:
        print(printable(f"{entry.path}: {entry.problem}"))
    if options.action == "verify":
        print(f"{len(found) - len(damaged)} of {len(found)} files are intact" + (", see above" if damaged else ""))
        return 1 if damaged else 0
    if removed:
        print("removed")
    elif options.action == "clear":
        print("nothing was removed: add --yes")
    return 0


def selected(options: argparse.Namespace) -> list[cache.Entry]:
    """Returns the cached kernels that the options name, all damaged files, and unless they are removed those that could
    not be read.
    """
    arch = None if options.arch is None else archs.of_gpu(options.arch).name
    found = []
    total = sum(1 for _ in cache.directory().glob("*.artifact")) if sys.stderr.isatty() else 0
    with ProgressBar(total) as bar:
        for entry in cache.entries():
            bar.step(entry.path.stem[:16])
            named = arch in (None, entry.arch) and options.family in (None, entry.kernel)
            named = named and not (options.stale and entry.current)
            if entry.problem and (options.arch or options.family or options.stale):
                named = entry.damaged or options.action != "clear"
            if named:
                found.append(entry)
    return found


def groups(found: Sequence[cache.Entry]) -> list[tuple[Any, ...]]:
    """Returns (architecture, family, kernels, bytes, current kernels), sorted."""
    sums: dict[tuple[str, str], list[int]] = {}
    for entry in found:
        numbers = sums.setdefault((entry.arch, entry.kernel), [0, 0, 0])
        for i, number in enumerate((1, entry.num_bytes, int(entry.current))):
            numbers[i] += number
    return [(arch, kernel, *numbers) for (arch, kernel), numbers in sorted(sums.items())]


def report(found: Sequence[cache.Entry]) -> str:
    rows = [(arch, kernel, count, format_bytes(size), current) for arch, kernel, count, size, current in groups(found)]
    size = format_bytes(sum(entry.num_bytes for entry in found))
    last = f"{len(found)} kernels, {size}, in {cache.directory()}"
    return "\n".join((table(HEADER, rows, left=2), "", last)) if rows else last
