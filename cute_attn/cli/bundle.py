"""`bundle`: writes compiled kernels to a directory, for machines without the DSL."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from cute_attn.cli import specs, warmup
from cute_attn.cli.terminal import format_bytes, format_seconds
from cute_attn.errors import ArgumentError
from cute_attn.runtime import bundle
from cute_attn.runtime.spec import KernelSpec


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bundle",
        help="write compiled kernels to a directory, for machines without the DSL",
        description=(
            "Compiles kernels (or finds them in the cache) and writes them to DIR. On the other machine set "
            "CUTE_ATTN_BUNDLE=DIR, or several directories separated by ':'. With CUTE_ATTN_DISABLE_JIT=1 a kernel "
            "that is in none of them is an error there. For a model (--model-config, or --num-qo-heads and --head-dim) "
            "these are the kernels that `warmup` compiles; with --spec those named; otherwise a sample of every "
            "family, in which a model may miss some. After an interruption, the same command goes on."
        ),
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    specs.add_options(parser)
    warmup.add_options(parser)


def selected(options: argparse.Namespace) -> dict[str, list[KernelSpec]]:
    """Returns the kernels of the model that the options describe, or those of `--spec`, or the default ones."""
    if not warmup.describes_a_model(options):
        return specs.selected(options)
    if options.spec:
        raise ArgumentError("--spec must not be given with the options of a model")
    found, refused = warmup.of_model(options, warmup.shapes_of(options), specs.targets(options.arch))
    for line in refused:
        print(f"no backend: {line}", file=sys.stderr)
    if not any(found.values()):
        raise ArgumentError("no backend takes the model: no bundle was written")
    return found


def run(options: argparse.Namespace) -> int:
    chosen, directory = selected(options), options.directory
    bundle.previous(directory)  # refuses a directory before anything is compiled
    start = time.monotonic()
    outcomes = specs.compile_all(chosen, options.jobs)
    before = bundle.write(directory, outcomes.values())
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{len(outcomes)} kernels for {', '.join(chosen)} in {directory} ({format_bytes(num_bytes)}), "
        f"{before} of them there before, in {format_seconds(time.monotonic() - start)}"
    )
    return 0
