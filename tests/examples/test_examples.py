"""Every script in `examples/` runs as a newcomer would run it, on the CPU, from the root of a checkout."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.support import subprocesses
from tests.support.subprocesses import ROOT


class Example(NamedTuple):
    """Arguments that keep a script small on a CPU, and what it must print: on stderr where it exits with an error."""

    arguments: tuple[str, ...] = ()
    output: str = r"\S"  # a pattern that it contains
    code: int = 0  # of its exit
    stderr: bool = True  # whether it may write there, as other packages do


SERVED = Example(("--check",), r"check: \d+ of 128 tokens are those of eager attention.*: ok", stderr=False)
EXAMPLES = {  # scripts that are not here run without arguments, and must print something
    "llama": SERVED,
    "deepseek": SERVED,
    "torch_compile": Example(("--steps", "14"), r"14 steps, 1 graph, largest difference from eager calls 0\.0"),
    "vllm_generate": Example(("MODEL",), "this example needs a GPU", code=1),
}


def commands() -> dict[str, list[str]]:
    """Return the command of every script and of every folder with a `__main__.py`, by name."""
    scripts = {path.stem: [str(path.relative_to(ROOT))] for path in sorted((ROOT / "examples").glob("*.py"))}
    folders = [path.parent.name for path in sorted((ROOT / "examples").glob("*/__main__.py"))]
    return {**scripts, **{name: ["-m", f"examples.{name}"] for name in folders}}


def test_every_line_of_the_table_has_a_script() -> None:
    assert set(EXAMPLES) <= set(commands())


@pytest.mark.parametrize("name", commands())
def test_example(name: str) -> None:
    example = EXAMPLES.get(name, Example())
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocesses.python(*commands()[name], *example.arguments, **alone)
    assert done.returncode == example.code, done.stdout + done.stderr
    assert re.search(example.output, done.stderr if example.code else done.stdout), done.stdout + done.stderr
    assert example.stderr or not done.stderr  # progress bars are for terminals
