"""Bundles: a directory of artifacts with a manifest, built where the DSL is and used where it is not.

`manifest.json` names the kernel sources and, for every artifact, its file. A bundle holds good for one
state of the kernel sources: one that was built from others is refused, never silently passed over.
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
    """The bundles named by `CUTE_ATTN_BUNDLE`, separated like PATH."""
    return [Path(part) for part in os.environ.get("CUTE_ATTN_BUNDLE", "").split(os.pathsep) if part]


def find(spec: KernelSpec, arch: str) -> Artifact | None:
    """The artifact from the first bundle that has it. ArtifactError for an unreadable or foreign bundle."""
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
    """Write a bundle: artifacts first, the manifest that makes them visible last."""
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
