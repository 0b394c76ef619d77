"""Command line: one module per command, each with `add(commands)` and `run(options)`.

`run` returns the exit code: 0 success, 1 a check failed, 2 invalid arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cute_attn.cli import bundle, cache, demo, doctor, emulate, explain, kernels, replay, support
from cute_attn.errors import ArtifactError

COMMANDS = (
    demo,
    doctor,
    explain,
    emulate,
    replay,
    kernels,
    bundle,
    cache,
    support,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn", description="Attention kernels for NVIDIA GPUs, with FlashInfer's API."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # base of all errors about arguments: see cute_attn.errors
        print(f"error: {error}", file=sys.stderr)
        return 2
