"""`support`: prints the support table of the README, generated from the table that dispatch uses."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser = commands.add_parser("support", help="print the support table as Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from cute_attn.dispatch import capabilities

    print(capabilities.support_table(), end="")
    return 0
