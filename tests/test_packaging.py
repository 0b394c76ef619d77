"""The wheel: what it contains, and what its metadata asks of an installer."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: setuptools writes into the source tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "cute_attn", tree / "cute_attn", ignore=shutil.ignore_patterns("__pycache__"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", BUILD, out], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_every_module_is_there_and_typed(wheel: zipfile.ZipFile) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cute_attn").rglob("*.py")}
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == modules | {"cute_attn/py.typed"}


def test_license_is_there(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def requirements(metadata: Message, extra: str) -> set[str]:
    """Returns the requirements of an extra, or of a plain install (""), without versions of other packages."""
    found = [line.split(";") for line in metadata.get_all("Requires-Dist", [])]
    return {line[0].strip() for line in found if (f'extra == "{extra}"' in line[-1] if extra else len(line) == 1)}


def test_flavours_of_the_dsl(metadata: Message) -> None:
    """Engines pin version and flavour of the DSL: neither may be excluded here. The plain one is CUDA 12's."""
    assert "nvidia-cutlass-dsl>=4.8.0" in requirements(metadata, "")
    assert "nvidia-cutlass-dsl>=4.8.0" in requirements(metadata, "cu12")
    assert "nvidia-cutlass-dsl[cu13]>=4.8.0" in requirements(metadata, "cu13")
    assert {"cu12", "cu13", "test"} <= {*metadata.get_all("Provides-Extra", [])}


def test_classifiers(metadata: Message) -> None:
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Requires-Python"] == ">=3.10"
