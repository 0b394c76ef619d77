"""Times tiles of the wgmma kernel and rings of the decode kernel that are not in their tables, beside the tables' and
the peers. GPU only:

    python -m perf.tune prefill --rows d128 h32/8 --around
    python -m perf.tune prefill --rows d256 --try rows=128,cols=64,q_registers=128 section_mib=16
    python -m perf.tune decode --rows b1 --try 8x2x16x1c6 4x3x16x1

Prefill rows take tiles (`perf.tiles`), decode rows rings (`perf.rings`). `--around`: tiles that differ from the table's
in one field, and all rings that fit. Kernels are compiled first, in several processes; those that need stack are left
out, the others are checked against the reference and timed in random order. What wins is entered by hand into
`cute_attn/kernels/fa3/tiles.py` and `cute_attn/kernels/xqa/tiles.py`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cute_attn.kernels.programs import program
from cute_attn.runtime import arch as archs
from cute_attn.runtime import artifacts
from cute_attn.runtime.arch import Arch
from perf import rings, run, tiles
from perf.bench import OURS
from perf.peers import Bind
from perf.tiles import Trial
from perf.workloads import BatchWorkload


class Candidate(NamedTuple):
    """A kernel of a row, None for the table's, and what launches it."""

    spec: Any
    bind: Bind


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = run.parser("tune", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--try", nargs="+", default=[], dest="texts", metavar="TEXT", help="tiles or rings, as above")
    parser.add_argument("--around", action="store_true", help="tiles and rings around those of the tables")
    options = parser.parse_args(argv)
    for text in options.texts:
        try:
            rings.RING.fullmatch(text) or Trial.parse(text)
        except ValueError as error:
            parser.error(f"--try must name tiles or rings: {error}")
    return options


def candidates(w: BatchWorkload, options: argparse.Namespace, arch: Arch) -> dict[str, Candidate]:
    """Returns what is tried on a row, by name."""
    if w.phase == "batch decode":
        return _rings(w, options, arch)
    return _tiles(w, options)


def _tiles(w: BatchWorkload, options: argparse.Namespace) -> dict[str, Candidate]:
    trials = [Trial.parse(text) for text in options.texts if not rings.RING.fullmatch(text)]
    if options.around:
        trials += map(Trial, tiles.neighbours(w.head_dim, tiles.of_table(w)))
    return {
        f"{OURS} {trial.name}": Candidate(
            tiles.spec(w, trial.tile) if trial.tile else None, functools.partial(tiles.bind, trial)
        )
        for trial in trials
    }


def _rings(w: BatchWorkload, options: argparse.Namespace, arch: Arch) -> dict[str, Candidate]:
    start = rings.start_of(w, arch)
    specs = [rings.ring(text, start) for text in options.texts if rings.RING.fullmatch(text)]
    specs += rings.around(start, w, arch) if options.around else []
    kept = [spec for spec in dict.fromkeys(specs) if spec != start and rings.resident(spec, arch)]
    return {f"{OURS} {rings.title(spec)}": Candidate(spec, functools.partial(rings.bind, spec, arch)) for spec in kept}


def compile_all(found: Sequence[Mapping[str, Candidate]], arch: Arch) -> None:
    """Compiles the kernels of all candidates, in several processes; binds say what went wrong."""
    specs = [candidate.spec for row in found for candidate in row.values() if candidate.spec is not None]
    artifacts.get_many({arch.name: list(dict.fromkeys(specs))}, program)


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields the candidates of every row, fastest first: speed, relative to "auto" and to the best peer."""
    for row in record["rows"]:
        entries = row["candidates"]
        speeds = {name: entry["speed"] for name, entry in entries.items() if "speed" in entry}
        own, peer = speeds.get(OURS), speeds.get(row["best_peer"])
        yield f"{row['name']} [{row['unit']}, SM {row['sm_clock_mhz']} MHz]"
        for name in sorted(speeds, key=speeds.__getitem__, reverse=True):
            ratios = [f"{speeds[name] / base:.3f}" if base else "-" for base in (own, peer)]
            yield f"  {speeds[name]:7.1f}  {ratios[0]:>5} of auto  {ratios[1]:>5} of the best peer  {name}"
        yield from (f"        -  {name}: {entry['reason']}" for name, entry in entries.items() if "reason" in entry)
    yield from (f"{name}: {why}" for name, why in record["failed_rows"].items())


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(argv)
    sections = run.measured_sections(options)
    arch = archs.for_device(torch.cuda.current_device())
    rows = {w: candidates(w, options, arch) for section in sections.values() for w in section.workloads}
    compile_all(list(rows.values()), arch)

    def more(w: BatchWorkload) -> dict[str, Bind]:
        return {name: candidate.bind for name, candidate in rows[w].items()}

    print("\n".join(lines(run.run("tune", sections, options, more))))


if __name__ == "__main__":
    main()
