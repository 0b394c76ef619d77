"""`bundle`: writes compiled kernels to a directory, for machines without the DSL."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cute_attn.cli import specs
from cute_attn.cli.terminal import ProgressBar, format_bytes, format_seconds, interruptible
from cute_attn.kernels.programs import program
from cute_attn.runtime import artifacts


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bundle",
        help="write compiled kernels to a directory, for machines without the DSL",
        description=(
            "Compiles kernels (or finds them in the cache) and writes them to DIR. On the other machine set "
            "CUTE_ATTN_BUNDLE=DIR, or several directories separated by ':'. With CUTE_ATTN_DISABLE_JIT=1 a kernel "
            "that is in none of them is an error there. The bundle contains only the kernels that this command names. "
            "After an interruption, the same command goes on."
        ),
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    specs.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    specs_by_arch = specs.selected(options)
    total = sum(len(selected) for selected in specs_by_arch.values())
    with interruptible(), ProgressBar(total) as bar:
        try:
            before = artifacts.write_bundle(
                options.directory,
                specs_by_arch,
                program,
                options.jobs,
                lambda spec, arch, outcome: bar.step(f"{arch} {specs.label(spec)}"),
            )
        except KeyboardInterrupt:
            print(f"interrupted after {bar.done} of {total} kernels: the same command goes on", file=sys.stderr)
            raise
    num_bytes = sum(path.stat().st_size for path in options.directory.iterdir())
    print(
        f"{total} kernels for {', '.join(specs_by_arch)} in {options.directory} ({format_bytes(num_bytes)}), "
        f"{before} of them there before, in {format_seconds(bar.seconds)}"
    )
    return 0
