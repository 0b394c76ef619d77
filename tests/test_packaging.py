"""The wheel: what it contains, and what its metadata asks of an installer."""

from __future__ import annotations

import email
import re
import zipfile
from email.message import Message

import pytest

import cute_attn
from tests.support import wheels
from tests.support.wheels import ROOT

DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "examples" / "Dockerfile"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheels.built(tmp_path_factory.mktemp("build")))


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


def test_the_version_is_that_of_the_package(metadata: Message) -> None:
    assert metadata["Version"] == cute_attn.__version__


def test_classifiers(metadata: Message) -> None:
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Requires-Python"] == ">=3.10"


def test_documents_name_the_oldest_versions_that_are_declared(metadata: Message) -> None:
    declared: dict[str, set[str]] = {}
    for requirement in metadata.get_all("Requires-Dist", []):
        if found := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement):
            declared.setdefault(found[1], set()).add(found[2])
    names = "|".join(sorted(declared, key=len, reverse=True))
    installed, needed = rf"\b({names})>=([\d.]+)", rf"\b({names})(?: \([^)]*\))?(?: \||,)? ([\d.]+) or later"
    texts = [(path.name, path.read_text()) for path in DOCUMENTS]
    found = [(page, *each) for page, text in texts for form in (installed, needed) for each in re.findall(form, text)]
    assert {"torch", "nvidia-cutlass-dsl", "cuda-python"} <= {name for _, name, _ in found}
    assert not [each for each in found if each[2] not in declared[each[1]]]
