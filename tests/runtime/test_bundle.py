"""Bundles: whose files are used, and what is left of a bundle that is written again."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import warnings
from pathlib import Path

import pytest

from cute_attn.errors import ArtifactError
from cute_attn.runtime import artifacts, bundle, cache, dsl
from cute_attn.runtime.artifact import Artifact
from tests.support.toy_spec import ToySpec, toy_program

SPEC, OTHER = ToySpec(), ToySpec(threads=64)
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsl, "version", lambda: "4.8.1 cu13")
    monkeypatch.setenv("CUTE_ATTN_BUNDLE", str(tmp_path / "bundle"))
    monkeypatch.setattr(artifacts, "_memory", {})
    bundle._contents.cache_clear()


def made(spec: ToySpec, arch: str = ARCH, cubin: bytes = b"cubin") -> Artifact:
    numbers = (spec.threads, 1, 1), 0, 40, 0, 2
    return Artifact(arch, spec.symbol, cubin, "ptx", (), *numbers, json.loads(spec.key()), dsl="4.8.1 cu13")


def written(tmp_path: Path, *artifacts: Artifact) -> Path:
    directory = tmp_path / "bundle"
    bundle.write(directory, artifacts or [made(SPEC)])
    return directory


GIVEN_AWAY = 0
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.mark.parametrize("danger", [0o002, 0o020, pytest.param(GIVEN_AWAY, marks=AS_ROOT)])
@pytest.mark.parametrize("where", [".", "manifest.json", "*.artifact"])
def test_a_bundle_that_others_control_is_refused(danger: int, where: str, tmp_path: Path) -> None:
    def endanger() -> None:
        path.chmod(path.stat().st_mode | danger)
        if danger == GIVEN_AWAY:
            os.chown(path, 65534, -1)

    message = "user 65534" if danger == GIVEN_AWAY else "chmod go-w"
    directory = written(tmp_path)
    path = directory if where == "." else next(directory.glob(where))
    if where != "*.artifact":
        endanger()
        with pytest.raises(ArtifactError, match=message):
            bundle.counts(directory)
    else:
        assert bundle.find(SPEC, ARCH) == made(SPEC)  # its manifest is known from now on
        endanger()
    with pytest.raises(ArtifactError, match=message) as caught:
        bundle.find(SPEC, ARCH)
    assert str(path) in str(caught.value)
    if where == "*.artifact":
        written(tmp_path)  # puts a private file in its place
        assert bundle.find(SPEC, ARCH) == made(SPEC)
        return
    with pytest.raises(ArtifactError, match=f"^no bundle written: .*{path}.*{message}"):
        written(tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_a_new_bundle_is_usable_under_every_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        directory = written(tmp_path)
    finally:
        os.umask(before)
    assert bundle.find(SPEC, ARCH) == made(SPEC)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())]
    assert modes == [0o755, 0o644, 0o644]


def test_a_second_call_adds_to_a_bundle(tmp_path: Path) -> None:
    directory = written(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(tmp_path, made(SPEC, "sm_80"), made(OTHER))
        written(tmp_path, made(SPEC, cubin=b"newer"))
        assert bundle.write(directory, []) == 0
    assert bundle.counts(directory) == {ARCH: 2, "sm_80": 1}
    assert bundle.find(SPEC, "sm_80") == made(SPEC, "sm_80")
    assert bundle.find(OTHER, ARCH) == made(OTHER)
    assert bundle.find(SPEC, ARCH) == made(SPEC, cubin=b"newer")


@pytest.mark.parametrize("change", ["sources", "dsl", "file"])
def test_kernels_that_leave_a_bundle_are_counted(change: str, tmp_path: Path) -> None:
    directory = written(tmp_path, made(SPEC), made(OTHER))
    if change == "file":
        next(directory.glob(f"*{cache.key_of_artifact(made(OTHER))[:16]}*")).unlink()
    else:
        manifest = json.loads((directory / bundle.MANIFEST).read_text())
        manifest[change] = "another"
        (directory / bundle.MANIFEST).write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match=r"bundle .*bundle no longer names 1 kernels that it had"):
        written(tmp_path, made(SPEC))
    assert bundle.counts(directory) == {ARCH: 1}
    assert bundle.find(OTHER, ARCH) is None


def test_a_failure_leaves_the_bundle_that_was_there(tmp_path: Path) -> None:
    directory = written(tmp_path)
    with pytest.raises(ArtifactError, match="one version and flavour of the DSL"):
        written(tmp_path, made(SPEC), dataclasses.replace(made(OTHER), dsl="4.8.0 cu12"))
    assert len(list(directory.iterdir())) == 2
    assert bundle.find(SPEC, ARCH) == made(SPEC)


def test_a_bundle_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cache, "source_fingerprint", lambda: "0" * 64)
        written(tmp_path)
    with pytest.raises(ArtifactError, match=r"built from other kernel sources \(000000000000\).*build it again"):
        bundle.find(SPEC, ARCH)


def test_a_broken_bundle_is_an_error_not_a_miss(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="bundle, which is not a readable bundle"):
        artifacts.get(SPEC, ARCH, toy_program)
    (file,) = written(tmp_path).glob("*.artifact")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=rf"{file.name} is missing or damaged"):
        artifacts.get(SPEC, ARCH, toy_program)


def test_another_artifact_in_a_bundle_is_refused(tmp_path: Path) -> None:
    one, two = written(tmp_path, made(SPEC), made(OTHER)).glob("*.artifact")
    one_content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(one_content)
    for spec in (SPEC, OTHER):
        with pytest.raises(ArtifactError, match=rf'the manifest names it for .*"threads":{spec.threads}.*build'):
            bundle.find(spec, ARCH)
