"""Bundles: directories of compiled artifacts with a manifest, for machines without the DSL.

`manifest.json` holds the fingerprint of the kernel sources, the version and flavour of the DSL, and the file of every
artifact. A bundle is valid for one state of the kernel sources: one built from other sources raises an error and is
never skipped silently.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path

from cute_attn.errors import ArtifactError
from cute_attn.runtime import cache
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec

MANIFEST = "manifest.json"
MAX_BUNDLES = 16  # whose manifests are kept


def directories() -> list[Path]:
    """Returns the bundles named by `CUTE_ATTN_BUNDLE`, separated like PATH."""
    return [Path(part) for part in os.environ.get("CUTE_ATTN_BUNDLE", "").split(os.pathsep) if part]


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


def write(directory: Path, artifacts: Iterable[tuple[KernelSpec, Artifact]]) -> None:
    """Writes a bundle: first the artifacts, last the manifest that makes them visible.

    Raises ArtifactError unless one version and flavour of the DSL compiled all of them.
    """
    artifacts = list(artifacts)
    versions = {artifact.dsl for _, artifact in artifacts}
    if len(versions) > 1:
        raise ArtifactError(f"a bundle must come from one version and flavour of the DSL, got {sorted(versions)}")
    dsl_version = versions.pop() if versions else ""
    directory.mkdir(parents=True, exist_ok=True)
    entries = {}
    for spec, artifact in artifacts:
        key = cache.key_of(spec, artifact.arch, dsl_version)
        name = f"{spec.symbol}-{artifact.arch}-{key[:16]}.artifact"
        cache.write_atomically(directory / name, artifact.to_bytes())
        entries[key] = {"file": name, "arch": artifact.arch, "spec": artifact.spec}
    manifest = {"sources": cache.source_fingerprint(), "dsl": dsl_version, "artifacts": entries}
    cache.write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    _contents.cache_clear()
