"""Finds or compiles artifacts: looks in memory, then in bundles, then in the disk cache, then compiles.

`CUTE_ATTN_DISABLE_JIT=1` forbids the last step, and so does a machine without the DSL.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from cute_attn.errors import ArtifactError
from cute_attn.runtime import arch as archs
from cute_attn.runtime import bundle, cache, dsl, switches
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.compile import compile_spec, dsl_import_error
from cute_attn.runtime.spec import KernelSpec, ProgramOf

Outcome = Artifact | ArtifactError
Progress = Callable[[KernelSpec, str, Outcome], None]
Task = tuple[KernelSpec, str]

MAX_ARTIFACTS = 256  # in memory, of some 0.3 MB each: loaded kernels hold their own

logger = logging.getLogger(__name__)

_memory: dict[tuple[KernelSpec, str], Artifact] = {}
_memory_lock = threading.Lock()


def get(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Artifact:
    """Returns the artifact of `spec` for `arch` ("sm_90a", ...); if needed, compiles what `program_of` builds.

    Raises ArtifactError if there is none and it cannot be compiled.
    """
    artifact = _memory.get((spec, arch))
    if artifact is None:
        archs.named(arch)
        artifact = _remember(spec, arch, _stored(spec, arch) or _compile(spec, arch, program_of))
    return artifact


def get_many(
    specs_by_arch: Mapping[str, Sequence[KernelSpec]],
    program_of: ProgramOf,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, KernelSpec], Outcome]:
    """Calls `get` for every spec of every arch, and compiles the missing ones in up to `jobs` processes (default: one
    per CPU, at most 8), each of which takes 0.3-0.6 GB of memory.

    Failures are returned as values, so that one broken spec does not hide the others. `progress(spec, arch, outcome)`
    is called in this process as each one is there.
    """
    tasks = [(spec, arch) for arch, specs in specs_by_arch.items() for spec in specs]
    outcomes: dict[Task, Outcome] = {}

    def done(task: Task, outcome: Outcome) -> None:
        outcomes[task] = _remember(*task, outcome) if isinstance(outcome, Artifact) else outcome
        if progress:
            progress(*task, outcome)

    for task in tasks:
        archs.named(task[1])
        found = _memory.get(task) or _stored(*task)
        if found is not None:
            done(task, found)
    missing = [task for task in tasks if task not in outcomes]
    jobs = min(jobs or min(os.cpu_count() or 1, 8), len(missing))
    if jobs > 1 and can_compile():  # imports the DSL before the fork: workers share its pages and start at once
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
            futures = {pool.submit(_outcome, *task, program_of): task for task in missing}
            for future in as_completed(futures):
                died = future.exception()
                lost = None if died is None else ArtifactError(f"a compile worker died: {type(died).__name__}: {died}")
                done(futures[future], lost or future.result())
    else:
        for task in missing:
            done(task, _outcome(*task, program_of))
    return {(arch, spec): outcomes[spec, arch] for spec, arch in tasks}


def _outcome(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Outcome:
    try:
        return get(spec, arch, program_of)
    except ArtifactError as err:
        return ArtifactError(str(err))  # without traceback and causes, which may not survive pickling


def held() -> list[Artifact]:
    """Returns the artifacts in memory, of all architectures: what this process has used so far."""
    with _memory_lock:
        return list(_memory.values())


def _remember(spec: KernelSpec, arch: str, artifact: Artifact) -> Artifact:
    """Keeps an artifact in memory, in place of the oldest if there are too many. Returns the one that is kept."""
    with _memory_lock:
        if (spec, arch) not in _memory and len(_memory) >= MAX_ARTIFACTS:
            del _memory[next(iter(_memory))]
        return _memory.setdefault((spec, arch), artifact)


def _stored(spec: KernelSpec, arch: str) -> Artifact | None:
    source, found = "a bundle", bundle.find(spec, arch)
    key = cache.cache_key(spec, arch)
    if found is None and key:
        source, found = "the cache", cache.load(key, spec, arch)
    if found is not None:
        logger.debug("%s for %s comes from %s: %s", spec.kernel, arch, source, spec.key())
    return found


def _compile(spec: KernelSpec, arch: str, program_of: ProgramOf) -> Artifact:
    why_not = _why_no_jit()
    key = cache.cache_key(spec, arch)
    if why_not or key is None:
        raise ArtifactError(_missing_message(spec, arch, why_not))
    with cache.locked(key):
        artifact = cache.load(key, spec, arch)  # another process may have compiled it while this one waited
        if artifact is None:
            start = time.perf_counter()
            artifact = compile_spec(spec, arch, program_of)
            cache.store(key, artifact)
            seconds = time.perf_counter() - start
            logger.info("compiled %s for %s in %.2f s: %s", spec.kernel, arch, seconds, spec.key())
    return artifact


def can_compile() -> bool:
    """Tells whether kernels that are in no bundle and not in the cache can be compiled here."""
    return _why_no_jit() is None


def _why_no_jit() -> str | None:
    if switches.is_on(switches.DISABLE_JIT):
        return f"{switches.DISABLE_JIT} is set"
    if dsl.version() is None:
        return f"{dsl.PACKAGE} is not installed"
    return dsl_import_error()


def _missing_message(spec: KernelSpec, arch: str, why_not: str | None) -> str:
    bundles = ", ".join(map(str, bundle.directories())) or "none (CUTE_ATTN_BUNDLE is not set)"
    searched = cache.directory() if dsl.version() else "not searched: its keys contain the version of the DSL"
    return (
        f"no compiled kernel for {spec.key()} on {arch}, and compiling is not possible: {why_not}.\n"
        f"  bundles: {bundles}\n"
        f"  cache: {searched}\n"
        "Build a bundle on a machine that has the DSL, in a new folder DIR, and add DIR to CUTE_ATTN_BUNDLE here:\n"
        f"  python -m cute_attn bundle --arch {arch} --spec '{spec.key()}' DIR\n"
        f"or one of all kernels of a model: python -m cute_attn bundle --arch {arch} --model-config CONFIG DIR"
    )
