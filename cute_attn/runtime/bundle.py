"""Bundles: directories of compiled artifacts with a manifest, for machines without the DSL.

`manifest.json` holds the fingerprint of the kernel sources and the file of every artifact. A bundle is valid for one
state of the kernel sources: one built from other sources raises an error and is never skipped silently.
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


def directories() -> list[Path]:
    """Returns the bundles named by `CUTE_ATTN_BUNDLE`, separated like PATH."""
    return [Path(part) for part in os.environ.get("CUTE_ATTN_BUNDLE", "").split(os.pathsep) if part]


def find(spec: KernelSpec, arch: str) -> Artifact | None:
    """Returns the artifact from the first bundle that has it.

    An unreadable bundle, or one built from other kernel sources, raises ArtifactError.
    """
    key = cache.bundle_key(spec, arch)
    for directory in directories():
        files = _files(directory)
        if key in files:
            return _read(directory / files[key])
    return None


@functools.cache
def _files(directory: Path) -> dict[str, str]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sources = manifest["sources"]
        files = {key: entry["file"] for key, entry in manifest["artifacts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ArtifactError(f"CUTE_ATTN_BUNDLE names {directory}, which is not a readable bundle: {err!r}") from err
    if sources != cache.source_fingerprint():
        raise ArtifactError(
            f"bundle {directory} was built from other kernel sources ({sources[:12]}) than this package has "
            f"({cache.source_fingerprint()[:12]}): build it again with this version of cute_attn"
        )
    return files


def _read(path: Path) -> Artifact:
    try:
        return Artifact.from_bytes(path.read_bytes())
    except (OSError, ArtifactError) as err:
        raise ArtifactError(f"bundle file {path} is missing or damaged: {err}") from err


def write(directory: Path, artifacts: Iterable[tuple[KernelSpec, Artifact]]) -> None:
    """Writes a bundle: first the artifacts, last the manifest that makes them visible."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = {}
    for spec, artifact in artifacts:
        key = cache.bundle_key(spec, artifact.arch)
        name = f"{spec.symbol}-{artifact.arch}-{key[:16]}.artifact"
        cache.write_atomically(directory / name, artifact.to_bytes())
        entries[key] = {"file": name, "arch": artifact.arch, "spec": artifact.spec}
    manifest = {"sources": cache.source_fingerprint(), "dsl": cache.dsl_version(), "artifacts": entries}
    cache.write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    _files.cache_clear()
