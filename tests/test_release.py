"""The wheel, installed into an environment of its own, does what a user's first minutes ask of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import cute_attn
from tests.support import wheels

CALL = """
import math, pathlib, torch, cute_attn
assert pathlib.Path(cute_attn.__file__).is_relative_to({prefix!r}), cute_attn.__file__
q, (k, v) = torch.randn(5, 4, 64).bfloat16(), torch.randn(2, 9, 2, 64).bfloat16()
out = cute_attn.single_prefill_with_kv_cache(q, k, v)
x, y, z = (t.double().transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
expected = ((x @ y.transpose(1, 2) / 8).softmax(-1) @ z).transpose(0, 1)
assert (out.double() - expected).abs().max() < 2e-2
print(cute_attn.__version__)
"""


class Environment:
    """A virtual environment without anything, and commands in it that see no other package than its own."""

    def __init__(self, directory: Path) -> None:
        self.prefix = directory / "venv"
        venv.create(self.prefix, with_pip=False)
        self.python = self.prefix / "bin" / "python"
        (self.site,) = self.prefix.glob("lib/python*/site-packages")
        self.cwd = directory

    def pip(self, *arguments: str) -> None:
        """Installs with the pip of this environment."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", *arguments]
        # With this tree on its path pip finds the metadata of an editable install, and installs nothing.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=self.cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str) -> str:
        """Output of Python, which must succeed."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CUTE_ATTN"))}
        env["CUTE_ATTN_CACHE_DIR"] = str(self.cwd / "cache")
        done = subprocess.run([self.python, *arguments], cwd=self.cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def check(self) -> None:
        """Imports the package, computes, and runs two commands."""
        assert self.run("-c", CALL.format(prefix=str(self.prefix))).strip() == cute_attn.__version__
        report = json.loads(self.run("-m", "cute_attn", "doctor", "--json"))
        assert not report["broken"]
        assert {"state": "ok", "name": "cute_attn", "text": cute_attn.__version__} in report["installed"]
        explained = json.loads(
            self.run("-m", "cute_attn", "explain", "--qo-len", "4096", "--causal", "--arch", "h100", "--json")
        )
        assert explained["chosen"] == "fa3"
        assert [launch["spec"]["kernel"] for launch in explained["launches"]] == ["fa3"]


def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Its requirements come from this environment; nothing is downloaded."""
    environment = Environment(tmp_path)
    environment.pip("--no-deps", "--no-index", str(wheels.built(tmp_path)))
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # A path only: .pth files there, of an editable cute_attn too, are not read. The DSL's must be.
    dsl = [str(file) for path in paths for file in Path(path).glob("nvidia_cutlass*.pth")]
    lines = [line for file in dsl for line in Path(file).read_text().splitlines()]
    (environment.site / "requirements.pth").write_text("\n".join((*sorted(paths), *lines)))
    environment.check()


@pytest.mark.skipif(
    not os.environ.get("CUTE_ATTN_TEST_INSTALL"),
    reason="downloads a gigabyte from a package index: CUTE_ATTN_TEST_INSTALL=1",
)
def test_the_wheel_works_with_the_oldest_requirements(tmp_path: Path) -> None:
    """Each requirement in the version that is declared as the oldest; torch as it is here, since package indices have
    older builds for the CPU only with CUDA. Also compiles a kernel with the oldest DSL.
    """
    environment, wheel = Environment(tmp_path), wheels.built(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = re.findall(r"^Requires-Dist: ([\w-]+)>=([\d.]+)$", archive.read(name).decode(), flags=re.MULTILINE)
    oldest = dict(found)
    assert {"nvidia-cutlass-dsl", "cuda-python", "numpy", "filelock", "torch"} <= set(oldest)
    oldest["torch"] = importlib.metadata.version("torch").split("+")[0]
    environment.pip(*(f"{name}=={version}" for name, version in oldest.items()))
    environment.pip("--no-deps", str(wheel))
    environment.check()
    output = environment.run("-m", "cute_attn", "emulate", "--arch", "sm_90a", "--causal", "--kernels", "fa3")
    assert output.rstrip().endswith(": ok")
