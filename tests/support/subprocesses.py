"""Runs snippets in new Python processes at the repository's root, some with packages made unimportable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A None entry in sys.modules makes `import name` raise ModuleNotFoundError.
_BLOCK = """
import importlib.metadata as _metadata, sys
for _name in {names!r}:
    sys.modules[_name] = None
_version = _metadata.version
def _without_blocked(name):
    if "cutlass" in {names!r} and name.startswith("nvidia-cutlass-dsl"):
        raise _metadata.PackageNotFoundError(name)
    return _version(name)
_metadata.version = _without_blocked
"""


def start(code: str, *, env: Mapping[str, str] | None = None, block: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `python -c code`; `block`: top-level packages to hide, as if they were not installed."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))  # then where packages of this process come from
    return subprocess.Popen(
        [sys.executable, "-c", (_BLOCK.format(names=tuple(block)) if block else "") + code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Standard output of a process that must succeed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def run(code: str, *, env: Mapping[str, str] | None = None, block: Sequence[str] = ()) -> str:
    return finish(start(code, env=env, block=block))
