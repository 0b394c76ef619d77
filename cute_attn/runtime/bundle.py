"""Bundles: directories of compiled artifacts with a manifest, for machines without the DSL.

`manifest.json` holds the fingerprint of the kernel sources, the version and flavour of the DSL, and the file of every
artifact. A bundle is valid for one state of the kernel sources: one built from other sources raises an error and is
never skipped silently. So does one that is not private, as in the cache: cubins are code.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cute_attn.errors import ArtifactError
from cute_attn.runtime import cache, switches
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
        entry = manifest["artifacts"].get(cache.key_of(spec.key(), arch, manifest["dsl"]))
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


def previous(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a directory that becomes a bundle, or that of an empty one. ArtifactError: `write` would
    refuse the directory.
    """
    try:
        return _manifest(directory)
    except FileNotFoundError:
        return {"sources": "", "dsl": "", "artifacts": {}}
    except cache.NotPrivate as err:
        raise ArtifactError(f"no bundle written: {err}") from err
    except _UNREADABLE as err:
        raise ArtifactError(f"no bundle written: {directory / MANIFEST} is not one of a bundle: {err!r}") from err


def write(directory: Path, outcomes: Iterable[Artifact | ArtifactError]) -> int:
    """Makes a directory a bundle of these artifacts, and returns how many of them it had already.

    The manifest comes last: it makes the artifacts visible. What the directory's manifest already names from these
    sources and this DSL stays in the bundle; kernels that it no longer names are warned of. ArtifactError: failures
    among the outcomes, all of which it lists; not one version and flavour of the DSL compiled all artifacts; others may
    write to the directory or to its manifest, or that is not one of a bundle.
    """
    outcomes = list(outcomes)
    failures = [str(outcome) for outcome in outcomes if isinstance(outcome, ArtifactError)]
    if failures:
        raise ArtifactError(f"no bundle written, {len(failures)} artifacts failed:\n" + "\n".join(failures))
    made = {cache.key_of_artifact(found): found for found in outcomes if isinstance(found, Artifact)}
    versions = sorted({artifact.dsl for artifact in made.values()})
    if len(versions) > 1:
        raise ArtifactError(f"a bundle must come from one version and flavour of the DSL, got {versions}")
    before = previous(directory)
    sources, version = cache.source_fingerprint(), versions[0] if versions else before["dsl"]
    entries: dict[str, Any] = {}
    if (before["sources"], before["dsl"]) == (sources, version):
        old = before["artifacts"].items()
        entries = {key: entry for key, entry in old if (directory / entry["file"]).is_file()}
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)  # private under every umask
    present = len(entries.keys() & made.keys())
    for key, artifact in made.items():
        file = f"cute_attn_{artifact.spec['kernel']}-{artifact.arch}-{key[:16]}.artifact"
        entries[key] = {"file": file, "arch": artifact.arch, "spec": artifact.spec}
        cache.write_atomically(directory / file, artifact.to_bytes())
    if dropped := len(before["artifacts"].keys() - entries.keys()):
        warnings.warn(
            f"bundle {directory} no longer names {dropped} kernels that it had: their files are gone, or come "
            "from other kernel sources or another DSL",
            stacklevel=2,
        )
    manifest = {"sources": sources, "dsl": version, "artifacts": entries}
    cache.write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    _contents.cache_clear()
    return present
