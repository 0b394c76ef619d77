"""Where an artifact comes from: memory, then bundles, then the disk cache, then a compile.

`CUTE_ATTN_DISABLE_JIT=1` forbids the last step, and so does a machine without the DSL.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cute_attn.errors import ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import bundle, cache, switches
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.compile import Outcome, Progress, compile_many, compile_spec, dsl_import_error
from cute_attn.runtime.spec import KernelSpec, ProgramOf

_memory: dict[tuple[KernelSpec, str], Artifact] = {}


def get(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Artifact:
    """The artifact of `spec` for `arch` ("sm_90a", ...); if need be, what `program_of` makes of it is compiled.

    ArtifactError if there is none to be had.
    """
    artifact = _memory.get((spec, arch))
    if artifact is None:
        archs.named(arch)
        artifact = _memory.setdefault((spec, arch), _stored(spec, arch) or _compile(spec, arch, program_of))
    return artifact


def get_many(
    specs_by_arch: Mapping[str, Sequence[KernelSpec]],
    program_of: ProgramOf,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, KernelSpec], Outcome]:
    """`get` for every spec of every arch; what must be compiled is compiled in up to `jobs` processes.

    Arguments and failures are those of `compile_many`.
    """
    outcomes: dict[tuple[str, KernelSpec], Outcome] = {}
    missing: dict[str, list[KernelSpec]] = {}
    for arch, specs in specs_by_arch.items():
        archs.named(arch)
        for spec in specs:
            found = _memory.get((spec, arch)) or _stored(spec, arch)
            if found is None:
                missing.setdefault(arch, []).append(spec)
                continue
            outcomes[arch, spec] = _memory.setdefault((spec, arch), found)
            if progress:
                progress(spec, arch, found)
    if missing:
        build = functools.partial(get, program_of=program_of)
        outcomes |= compile_many(missing, build, jobs if _obstacle() is None else 1, progress)
    for (arch, spec), outcome in outcomes.items():
        if isinstance(outcome, Artifact):
            _memory.setdefault((spec, arch), outcome)
    return {(arch, spec): outcomes[arch, spec] for arch, specs in specs_by_arch.items() for spec in specs}


def write_bundle(
    directory: str | os.PathLike[str],
    specs_by_arch: Mapping[str, Sequence[KernelSpec]],
    program_of: ProgramOf,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Make `directory` a bundle of these specs, compiling what is missing; ArtifactError lists failures."""
    outcomes = get_many(specs_by_arch, program_of, jobs, progress)
    failures = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, ArtifactError)]
    if failures:
        raise ArtifactError(f"no bundle written, {len(failures)} artifacts failed:\n" + "\n".join(failures))
    pairs = [(spec, outcome) for (_, spec), outcome in outcomes.items() if isinstance(outcome, Artifact)]
    bundle.write(Path(directory), pairs)


def _stored(spec: KernelSpec, arch: str) -> Artifact | None:
    found = bundle.find(spec, arch)
    key = cache.cache_key(spec, arch)
    return cache.load(key) if found is None and key else found


def _compile(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Artifact:
    obstacle = _obstacle() or dsl_import_error()
    key = cache.cache_key(spec, arch)
    if obstacle or key is None:
        raise ArtifactError(_missing(spec, arch, obstacle))
    with cache.locked(key):
        artifact = cache.load(key)  # another process may have compiled it while this one waited
        if artifact is None:
            artifact = compile_spec(spec, arch, program_of)
            cache.store(key, artifact)
    return artifact


def _obstacle() -> str | None:
    if switches.is_on(switches.DISABLE_JIT):
        return f"{switches.DISABLE_JIT} is set"
    if cache.dsl_version() is None:
        return "nvidia-cutlass-dsl is not installed"
    return None


def _missing(spec: KernelSpec, arch: str, obstacle: str | None) -> str:
    bundles = ", ".join(map(str, bundle.directories())) or "none (CUTE_ATTN_BUNDLE is not set)"
    searched = cache.directory() if cache.dsl_version() else "not searched, it needs the DSL's version"
    return (
        f"no compiled kernel for {spec.key()} on {arch}, and compiling is not possible: {obstacle}.\n"
        f"  bundles: {bundles}\n"
        f"  cache: {searched}\n"
        "Build it where the DSL is installed and set CUTE_ATTN_BUNDLE=DIR here:\n"
        f"  python -m cute_attn bundle --arch {arch} --spec '{spec.key()}' DIR"
    )
