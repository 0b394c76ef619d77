"""The wheel's kernels as subjects of the model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cute_attn.emulator import ptx
from perf.flash_attn_4.kernel import ROWS, Kernel
from perf.flash_attn_4.problem import Problem, Shape
from perf.sass.count import Subject
from perf.sass.tools import ToolError
from perf.sass.work import ROLES, STEP, Tiling, tile_step

ROOT = Path(__file__).parents[2]
VERSION = "4.0.0b36"
PACKAGES = f"flash-attn-4=={VERSION} einops apache-tvm-ffi torch-c-dlpack-ext quack-kernels triton"
INSTALL = f"flash-attn-4 does not import here: pip install --no-deps --target FOLDER {PACKAGES}, and --site FOLDER"
_PROBE = "import importlib.metadata as m, flash_attn.cute; print(m.version('flash-attn-4'))"


def version(site: Path | None) -> str:
    """Returns the version of the wheel that compiles; a ToolError says how to install it."""
    done = _python(["-c", _PROBE], site)
    if done.returncode:
        raise ToolError(f"{INSTALL}\n{done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()[-1]


def compiled(kernels: Sequence[Kernel], site: Path | None) -> dict[Kernel, tuple[str, bytes]]:
    """Returns PTX and cubin of the wheel's kernels, compiled in a process that alone sees the folder `site`."""
    with tempfile.TemporaryDirectory(prefix="cute_attn-") as folder:
        done = _python(["-m", "perf.flash_attn_4.compile", folder, *map(str, kernels)], site)
        if done.returncode:
            raise ToolError(f"flash-attn-4 does not compile: {done.stderr.strip()[-2000:]}")
        return {
            kernel: (Path(folder, kernel.file + ".ptx").read_text(), Path(folder, kernel.file + ".cubin").read_bytes())
            for kernel in kernels
        }


def subject(name: str, kernel: Kernel, text: str, cubin: bytes) -> Subject:
    """Returns what counts a compiled kernel: one cluster, one head."""
    ((symbol, entry),) = ptx.parse(text).items()
    warps = int(entry.directives["reqntid"].split(",")[0]) // 32
    mma_rows = 64 if kernel.arch == "sm_90a" else ROWS * kernel.ctas
    item_bytes = 1 if "8" in kernel.traits else 2

    def launch(kv_len: int) -> float:
        problem = Problem(kernel, Shape(kernel.rows, kv_len))
        # Their loads of tensor memory are not waited for before it is overwritten: without `strict`.
        problem.launch(text, strict=False, checks=False, events=True)
        return problem.error()

    return Subject(
        name=name,
        arch=kernel.arch,
        ptx=text,
        cubin=cubin,
        symbol=symbol,
        ctas=kernel.ctas,
        warps=warps,
        roles=ROLES["flash-attn-4", warps],
        work=tile_step((kernel.head_dim, kernel.dim_vo), item_bytes, Tiling(kernel.rows, mma_rows)),
        launch=launch,
        units=lambda kv_len: kernel.rows / STEP * -(-kv_len // STEP),
        softmax_rows=64 if kernel.arch == "sm_90a" else ROWS,
    )


def _python(arguments: Sequence[str], site: Path | None) -> subprocess.CompletedProcess[str]:
    # The folder goes last: what both have, such as the DSL, is that of this environment.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), *([str(site.resolve())] if site else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
