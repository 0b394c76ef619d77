"""Bundles: directories of compiled artifacts with a manifest, for machines without the DSL.

`manifest.json` holds the fingerprint of the kernel sources, the version and flavour of the DSL, and the file of every
artifact. A bundle is valid for one state of the kernel sources: one built from other sources raises an error and is
never skipped silently. So does one that is not private, as in the cache: cubins are code.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cute_attn.errors import ArtifactError
from cute_attn.runtime import cache, dsl, switches
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec

MANIFEST = "manifest.json"
MAX_BUNDLES = 16  # whose manifests are kept
_UNREADABLE = OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError  # of `_manifest`


def directories() -> list[Path]:
    """Returns the bundles named by `CUTE_ATTN_BUNDLE`, separated like PATH."""
    return [Path(part) for part in os.environ.get(switches.BUNDLE, "").split(os.pathsep) if part]


def find(spec: KernelSpec, arch: str) -> Artifact | None:
    """Returns the artifact from the first bundle that has it.

    An unreadable bundle, or one built from other kernel sources, raises ArtifactError.
    """
    for directory in directories():
        manifest = _contents(directory)
        entry = manifest["artifacts"].get(cache.key_of(spec, arch, manifest["dsl"]))
        if entry is not None:
            return _read(directory / entry["file"], spec, arch)
    return None


def counts(directory: Path) -> dict[str, int]:
    """Returns the number of kernels of a bundle by architecture; ArtifactError for one that cannot be used."""
    entries = _contents(directory)["artifacts"].values()
    return collections.Counter(str(entry.get("arch", "?")) for entry in entries)


@functools.lru_cache(MAX_BUNDLES)
def _contents(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a bundle that can be used."""
    try:
        manifest = _manifest(directory)
    except _UNREADABLE as err:
        raise ArtifactError(f"CUTE_ATTN_BUNDLE names {directory}, which is not a readable bundle: {err!r}") from err
    sources = manifest["sources"]
    if sources != cache.source_fingerprint():
        raise ArtifactError(
            f"bundle {directory} was built from other kernel sources ({sources[:12]}) than this package has "
            f"({cache.source_fingerprint()[:12]}): build it again with this version of cute_attn"
        )
    return manifest


def _manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest in a folder, of any sources. NotPrivate: somebody else could have written it."""
    cache.check_private(directory, os.stat(directory))
    manifest: dict[str, Any] = json.loads(cache.read_private(directory / MANIFEST))
    for text in (manifest["sources"], manifest["dsl"], *(entry["file"] for entry in manifest["artifacts"].values())):
        if type(text) is not str:
            raise TypeError(f"{text!r} is not a text")
        text.encode()  # a ValueError for text that is not Unicode
    return manifest


def _read(path: Path, spec: KernelSpec, arch: str) -> Artifact:
    try:
        artifact = Artifact.from_bytes(cache.read_private(path))
    except cache.NotPrivate as err:
        raise ArtifactError(f"a bundle's file is not used: {err}") from err
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

    The manifest comes last: it makes the artifacts visible. What the directory's manifest already names from these
    sources and this DSL stays in the bundle. ArtifactError: others may write to the directory or to what is in it, or
    its manifest is not one of a bundle.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._before = _previous(directory)
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
            artifact = Artifact.from_bytes(cache.read_private(self.directory / _file_name(spec, arch, key)))
        except cache.NotPrivate as err:
            raise ArtifactError(f"no bundle written: {err}") from err
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
        self._make_directory()
        key = cache.key_of(spec, artifact.arch, artifact.dsl)
        path = self.directory / _file_name(spec, artifact.arch, key)
        cache.write_atomically(path, artifact.to_bytes())
        self._written.append(path)
        self._enter(key, spec, artifact)

    def _enter(self, key: str, spec: KernelSpec, artifact: Artifact) -> None:
        self._versions.add(artifact.dsl)
        name = _file_name(spec, artifact.arch, key)
        self.entries[key] = {"file": name, "arch": artifact.arch, "spec": artifact.spec}

    def _make_directory(self) -> None:
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)  # private under every umask

    def finish(self) -> None:
        """Writes the manifest. Warns of kernels that it no longer names."""
        self._make_directory()
        before = _previous(self.directory)  # again: another process may have written one meanwhile
        sources, version = cache.source_fingerprint(), next(iter(self._versions), before["dsl"])
        entries: dict[str, Any] = {}
        if (before["sources"], before["dsl"]) == (sources, version):
            old = before["artifacts"].items()
            entries = {key: entry for key, entry in old if (self.directory / entry["file"]).is_file()}
        if dropped := len(before["artifacts"].keys() - entries.keys() - self.entries.keys()):
            warnings.warn(
                f"bundle {self.directory} no longer names {dropped} kernels that it had: their files are gone, or come "
                "from other kernel sources or another DSL",
                stacklevel=3,
            )
        manifest = {"sources": sources, "dsl": version, "artifacts": entries | self.entries}
        cache.write_atomically(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())
        _contents.cache_clear()

    def discard(self) -> None:
        """Removes what this writer has written and no manifest names, and the directory if it made it."""
        named = {entry["file"] for entry in self._before["artifacts"].values()}
        for path in self._written:
            if path.name not in named:
                path.unlink(missing_ok=True)
        if self._made_directory:
            with contextlib.suppress(OSError):  # somebody else put something there
                self.directory.rmdir()


def _previous(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a directory that becomes a bundle, or that of an empty one."""
    try:
        return _manifest(directory)
    except FileNotFoundError:
        return {"sources": "", "dsl": "", "artifacts": {}}
    except cache.NotPrivate as err:
        raise ArtifactError(f"no bundle written: {err}") from err
    except _UNREADABLE as err:
        raise ArtifactError(f"no bundle written: {directory / MANIFEST} is not one of a bundle: {err!r}") from err


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
