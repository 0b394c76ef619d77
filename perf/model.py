"""Performance model by executed machine code, without a GPU: `python -m perf.model --head-dim 128 --causal`.

For our kernels and for the forward kernels of flash-attn-4: issue slots by role, and clocks by unit of an SM, of a tile
step of 128 query rows by 128 keys. PTX runs on the emulator at two lengths; the SASS that ptxas makes of it says what
the difference is on a machine. It counts work, not time: docs/kernels/fa4.md says what that leaves out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perf.bench import publish, save
from perf.flash_attn_4 import choice
from perf.flash_attn_4 import subject as published
from perf.flash_attn_4.kernel import Kernel
from perf.harness import reason
from perf.machine import command_line, environment
from perf.sass import ours
from perf.sass.count import Counter, Subject, resources, same_code
from perf.sass.tools import ToolError, Tools, find
from perf.sass.units import RATES
from perf.sass.work import Roles

PEER = "flash-attn-4"
MASKS = {False: "full", True: "causal"}


def row(name: str, subject: Subject, causal: bool, tools: Tools) -> dict[str, Any]:
    """Returns the record of one kernel."""
    counter = Counter.of(subject, tools)
    found = {"name": name, "unit": subject.work.name, "math": list(subject.roles.math), **counter.steady()}
    if causal and (masked := counter.masked()):
        found["masked"] = {"math": found["math"], **masked}
    return {**found, **resources(subject), "same_code_as_the_dsl": same_code(subject, tools)}


def peers(options: argparse.Namespace) -> dict[str, Kernel]:
    """Returns the kernels of flash-attn-4 by the name of their rows."""
    found = {}
    for dims in options.head_dim:
        for causal in options.masks:
            found[f"{PEER} {title(dims)} {MASKS[causal]}"] = choice.choose(options.arch, dims, causal)
        if options.variants:
            for name, kernel in choice.variants(options.arch, dims).items():
                found[f"{PEER} {title(dims)} full, {name}"] = kernel
    return found


def title(dims: tuple[int, int]) -> str:
    return f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}/{dims[1]}"


def subjects(options: argparse.Namespace) -> Iterator[tuple[str, bool, Any]]:
    """Yields name, mask and what makes the subject of each row."""
    if PEER in options.kernel:
        kernels = peers(options)
        made = published.compiled(list(kernels.values()), options.site)
        for name, kernel in kernels.items():
            yield name, kernel.causal, lambda n=name, k=kernel: published.subject(n, k, *made[k])
    for backend in options.kernel:
        for dims in options.head_dim if backend != PEER else ():
            for causal in options.masks:
                name = f"{backend} {title(dims)} {MASKS[causal]}"
                arguments = backend, options.arch, dims, causal, options.roles, options.tile
                yield name, causal, lambda a=arguments: ours.subject(*a)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.model", description=__doc__)
    parser.add_argument(
        "--kernel", nargs="+", default=["auto", PEER], help=f"our backends, or {PEER} (default: auto {PEER})"
    )
    parser.add_argument("--arch", choices=RATES, default="sm_100a", help="default: sm_100a")
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=head_dims,
        default=list(choice.HEAD_DIMS),
        metavar="D",
        help="head dimensions, as 128 or 192/128 (default: 64 128 192/128 256)",
    )
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", dest="masks", action="store_const", const=[True], help="causal masks only")
    masks.add_argument("--full", dest="masks", action="store_const", const=[False], help="full attention only")
    parser.set_defaults(masks=[False, True])
    parser.add_argument(
        "--variants", action="store_true", help=f"also {PEER} with other shares of polynomials, and with one CTA a tile"
    )
    parser.add_argument(
        "--roles", type=Roles.parse, help='warps of our kernel, as "softmax*=0-7,correction*=8-11,MMA=12,load=13-15"'
    )
    parser.add_argument(
        "--tile",
        type=tile_fields,
        default={},
        metavar="FIELDS",
        help='tile fields of our kernel (fa3, fa4) that differ from the table: "softmax=row_max,polynomial=0"',
    )
    parser.add_argument("--tools", type=Path, help="folder where nvidia-cuda-nvcc and nvidia-cuda-nvdisasm are")
    parser.add_argument("--site", type=Path, help=f"folder where {PEER} is installed, if not in this environment")
    parser.add_argument("--out", type=Path, help="JSON file for the record, written after every row")
    return parser.parse_args(argv)


def head_dims(text: str) -> tuple[int, int]:
    """Returns the head dims that "128" or "192/128" names."""
    d_qk, _, d_vo = text.partition("/")
    return int(d_qk), int(d_vo or d_qk)


def tile_fields(text: str) -> dict[str, int | str]:
    """Returns the fields of a tile that "softmax=row_max,polynomial=0" names."""
    named = (part.partition("=") for part in text.split(","))
    return {name: int(value) if value.isdigit() else value for name, _, value in named}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        tools = find(options.tools)
        peer = {PEER: published.version(options.site)} if PEER in options.kernel else {}
    except ToolError as error:
        print(error, file=sys.stderr)
        return 2
    record: dict[str, Any] = {
        "command": command_line("model", sys.argv[1:] if argv is None else argv),
        "environment": {**environment(), **peer, **tools.versions()},
        "rates": {options.arch: dataclasses.asdict(RATES[options.arch])},
        "model": [],
        "failed_rows": {},
    }
    for name, causal, make in subjects(options):
        try:
            record["model"].append(row(name, make(), causal, tools))
        except Exception as error:  # a kernel that cannot be counted must not end the run
            record["failed_rows"][name] = reason(error)
        print(name, record["failed_rows"].get(name, ""), file=sys.stderr, flush=True)
        if options.out:
            save(record, options.out)
    publish(record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
