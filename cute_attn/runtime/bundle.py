"""Bundles: directories of compiled artifacts with a manifest, for machines without the DSL.

`manifest.json` holds the fingerprint of the kernel sources, the version and flavour of the DSL, and the file of every
artifact. A bundle is valid for one state of the kernel sources: one built from other sources raises an error and is
never skipped silently.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cute_attn.errors import ArtifactError
from cute_attn.runtime import cache, dsl, switches
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec

MANIFEST = "manifest.json"
MAX_BUNDLES = 16  # whose manifests are kept


def directories() -> list[Path]:
    """Returns the bundles named by `CUTE_ATTN_BUNDLE`, separated like PATH."""
    return [Path(part) for part in os.environ.get(switches.BUNDLE, "").split(os.pathsep) if part]


def find(spec: KernelSpec, arch: str) -> Artifact | None:
    """Returns the artifact from the first bundle that has it.

    An unreadable bundle, or one built from other kernel sources, raises ArtifactError.
    """
    for directory in directories():
        dsl_version, files = _contents(directory)
        file = files.get(cache.key_of(spec, arch, dsl_version))
        if file is not None:
            return _read(directory / file, spec, arch)
    return None


def counts(directory: Path) -> dict[str, int]:
    """Returns the number of kernels of a bundle by architecture; ArtifactError for one that cannot be used."""
    _contents(directory)
    manifest = json.loads((directory / MANIFEST).read_text())
    return collections.Counter(str(entry.get("arch", "?")) for entry in manifest["artifacts"].values())


@functools.lru_cache(MAX_BUNDLES)
def _contents(directory: Path) -> tuple[str, dict[str, str]]:
    """Returns the DSL that compiled a bundle, and its files by key."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sources, dsl_version = manifest["sources"], manifest["dsl"]
        files = {key: entry["file"] for key, entry in manifest["artifacts"].items()}
        for text in (sources, dsl_version, *files.values()):
            if type(text) is not str:
                raise TypeError(f"{text!r} is not a text")
            text.encode()  # a ValueError for text that is not Unicode
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ArtifactError(f"CUTE_ATTN_BUNDLE names {directory}, which is not a readable bundle: {err!r}") from err
    if sources != cache.source_fingerprint():
        raise ArtifactError(
            f"bundle {directory} was built from other kernel sources ({sources[:12]}) than this package has "
            f"({cache.source_fingerprint()[:12]}): build it again with this version of cute_attn"
        )
    return dsl_version, files


def _read(path: Path, spec: KernelSpec, arch: str) -> Artifact:
    try:
        artifact = Artifact.from_bytes(path.read_bytes())
    except (OSError, ValueError, ArtifactError) as err:  # ValueError: a name with a null character
        raise ArtifactError(f"bundle file {path} is missing or damaged: {err}") from err
    if not artifact.is_of(spec, arch):
        raise ArtifactError(
            f"bundle file {path} holds {artifact.spec} for {artifact.arch}, but the manifest names it for "
            f"{spec.key()} on {arch}: build the bundle again"
        )
    return artifact


class Writer:
    """Makes a directory a bundle, artifact by artifact. What an interrupted one has written is found again.

    The manifest comes last: it makes the artifacts visible.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: dict[str, dict[str, Any]] = {}
        self._versions: set[str] = set()
        self._written: list[Path] = []
        self._made_directory = False

    def resume(self, spec: KernelSpec, arch: str) -> bool:
        """Tells whether the directory has this artifact, from these sources and this DSL; then it becomes part of the
        bundle.
        """
        version = dsl.version()
        if version is None:
            return False
        key = cache.key_of(spec, arch, version)
        try:
            artifact = Artifact.from_bytes((self.directory / _file_name(spec, arch, key)).read_bytes())
        except (OSError, ArtifactError):
            return False
        if not artifact.is_of(spec, arch) or artifact.dsl != version:
            return False
        self._enter(key, spec, artifact)
        return True

    def add(self, spec: KernelSpec, artifact: Artifact) -> None:
        """Writes an artifact. ArtifactError: another version or flavour of the DSL compiled it than those before."""
        if self._versions - {artifact.dsl}:
            versions = sorted({*self._versions, artifact.dsl})
            raise ArtifactError(f"a bundle must come from one version and flavour of the DSL, got {versions}")
        self._made_directory |= not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        key = cache.key_of(spec, artifact.arch, artifact.dsl)
        path = self.directory / _file_name(spec, artifact.arch, key)
        cache.write_atomically(path, artifact.to_bytes())
        self._written.append(path)
        self._enter(key, spec, artifact)

    def _enter(self, key: str, spec: KernelSpec, artifact: Artifact) -> None:
        self._versions.add(artifact.dsl)
        name = _file_name(spec, artifact.arch, key)
        self.entries[key] = {"file": name, "arch": artifact.arch, "spec": artifact.spec}

    def finish(self) -> None:
        """Writes the manifest."""
        self.directory.mkdir(parents=True, exist_ok=True)
        version = next(iter(self._versions), "")
        manifest = {"sources": cache.source_fingerprint(), "dsl": version, "artifacts": self.entries}
        cache.write_atomically(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())
        _contents.cache_clear()

    def discard(self) -> None:
        """Removes what this writer has written, and the directory if it made it."""
        for path in self._written:
            path.unlink(missing_ok=True)
        if self._made_directory:
            with contextlib.suppress(OSError):  # somebody else put something there
                self.directory.rmdir()


def _file_name(spec: KernelSpec, arch: str, key: str) -> str:
    return f"{spec.symbol}-{arch}-{key[:16]}.artifact"


def write(directory: Path, artifacts: Iterable[tuple[KernelSpec, Artifact]]) -> None:
    """Writes a bundle.

    Raises ArtifactError unless one version and flavour of the DSL compiled all of them.
    """
    writer = Writer(directory)
    try:
        for spec, artifact in artifacts:
            writer.add(spec, artifact)
    except ArtifactError:
        writer.discard()
        raise
    writer.finish()
