"""Command line: one module per command, each with `add(commands)` and `run(options)`.

`run` returns the exit code: 0 success, 1 a check failed, 2 invalid arguments; 130 after Ctrl-C, 143 after
SIGTERM.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cute_attn.cli import bench, bundle, cache, demo, doctor, emulate, explain, kernels, replay, support, warmup
from cute_attn.errors import ArtifactError
from cute_attn.runtime import switches

COMMANDS = (
    demo,
    bench,
    doctor,
    explain,
    emulate,
    replay,
    kernels,
    bundle,
    cache,
    warmup,
    support,
)


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line: the usage of some commands is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n`{self.prog} --help` lists what there is.\n")

    def refuse(self, unknown: Sequence[str]) -> None:
        """Says of arguments that nobody knows what may have been meant, and exits with 2, unless there are none."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        meant = [match for text in unknown for match in difflib.get_close_matches(text.split("=")[0], flags, 1)]
        advice = f" (did you mean {', '.join(meant)}?)" if meant else ""
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}{advice}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = Parser(prog="python -m cute_attn", description="Attention kernels for NVIDIA GPUs, with FlashInfer's API.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {command.__name__.rpartition(".")[2]: command for command in COMMANDS}
    for command in COMMANDS:
        command.add(commands)
    options, unknown = parser.parse_known_args(argv)
    if modules[options.command] is bench:
        options.rest = unknown  # for a program of its own
    else:
        commands.choices[options.command].refuse(unknown)
    switches.configure_log()
    try:
        return modules[options.command].run(options)
    except ValueError as error:  # base of all errors about arguments: see cute_attn.errors
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ArtifactError, OSError) as error:  # a folder that is not there, or not the user's
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
