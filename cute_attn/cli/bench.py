"""`bench`: times our kernels and those of other libraries on this machine's GPU.

The benchmarks are the folder `perf` of a checkout, not part of the package: they know other libraries, and installing
cute_attn should not bring them along. `perf/command.py` has the options.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import cute_attn
from cute_attn.errors import ArtifactError


def add(commands: Any) -> None:
    what = "time our kernels beside other libraries (needs a GPU and a checkout)"
    commands.add_parser("bench", help=what, add_help=False)


def run(options: argparse.Namespace) -> int:
    root = Path(cute_attn.__file__).parents[1]
    if not (root / "perf" / "command.py").exists():
        raise ArtifactError(
            f"the benchmarks are not part of the installed package, and {root} is not a checkout of it. Clone the "
            "repository and run `python -m cute_attn bench` in its folder"
        )
    if importlib.util.find_spec("perf") is None:
        sys.path.append(str(root))
    return int(importlib.import_module("perf.command").main(options.rest))
