"""On-disk cache of artifacts: one file per spec, arch, kernel sources and DSL version.

Processes may share it: a lock file per key is held during a compile, files appear by `os.replace`, and a damaged
file counts as a miss. The directory is `$CUTE_ATTN_CACHE_DIR`, else `$XDG_CACHE_HOME/cute_attn`, else
`~/.cache/cute_attn`. A cache that cannot be written costs a warning and the time to compile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from cute_attn.errors import ArtifactError
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec

_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    *("kernels/**/*.py", "schedule/records.py"),
    *("runtime/spec.py", "runtime/compile.py", "runtime/cubin.py", "runtime/artifact.py"),
)
# Files and folders of kernels/ that only choose specs and parameters.
_HOST_ONLY = ("tiles.py", "catalog.py", "default_specs.py", "host")
_DSL = "nvidia-cutlass-dsl"
_warned: set[str] = set()


@functools.cache
def source_fingerprint() -> str:
    """Returns the sha256 of all sources that affect an artifact: the kernels, and the code that compiles them."""
    digest = hashlib.sha256()
    sources = {
        path
        for pattern in _SOURCES
        for path in _PACKAGE.glob(pattern)
        if not {path.name, path.parent.name} & {*_HOST_ONLY}
    }
    for path in sorted(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def dsl_version() -> str | None:
    """Returns version and toolkit flavour of the installed DSL ("4.8.1 cu13") without importing it; None if absent.

    The flavour contains ptxas: with several installed, the DSL takes the newest that the driver supports.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{importlib.metadata.version(_DSL)} {_flavour()}"
    return None


def _flavour() -> str:
    majors = []
    for major in range(12, 20):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(f"{_DSL}-libs-cu{major}")
            majors.append(major)
    limit = _driver_major() if len(majors) > 1 else None
    return f"cu{max((m for m in majors if limit is None or m <= limit), default='?')}"


def _driver_major() -> int | None:
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if status == 0 else None


def directory() -> Path:
    """Returns the directory of the cache, which need not exist yet."""
    chosen = os.environ.get("CUTE_ATTN_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(base, "cute_attn")


def bundle_key(spec: KernelSpec, arch: str) -> str:
    """Returns the key of an artifact built from the sources of this package, for any DSL version."""
    return _hash(spec.key(), arch, source_fingerprint())


def cache_key(spec: KernelSpec, arch: str) -> str | None:
    """Returns the key of an artifact in the cache; None without an installed DSL, whose version is part of the key."""
    version = dsl_version()
    return version and _hash(spec.key(), arch, source_fingerprint(), version)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def path_of(key: str) -> Path:
    return directory() / f"{key}.artifact"


def load(key: str) -> Artifact | None:
    """Returns the cached artifact; None if it is absent, unreadable or damaged."""
    try:
        return Artifact.from_bytes(path_of(key).read_bytes())
    except (OSError, ArtifactError):
        return None


def store(key: str, artifact: Artifact) -> None:
    """Puts `artifact` into the cache. Readers see the whole file or none."""
    try:
        write_atomically(path_of(key), artifact.to_bytes())
    except OSError as err:
        _warn_once(err)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to `path` through a temporary file in the same directory (mode 0600)."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Holds the lock of `key` among processes; does nothing without a writable cache."""
    with contextlib.ExitStack() as stack:
        try:
            _make_directory()
            stack.enter_context(FileLock(directory() / f"{key}.lock"))
        except OSError as err:
            _warn_once(err)
        yield


def _make_directory() -> None:
    if directory().parts[0] == "~":  # a user without a home: expanduser changes nothing
        raise OSError("no home directory")
    directory().mkdir(mode=0o700, parents=True, exist_ok=True)  # cubins are code: no other user may write here


def _warn_once(err: OSError) -> None:
    if str(directory()) not in _warned:
        _warned.add(str(directory()))
        warnings.warn(
            f"cute_attn cannot use its cache in {directory()} ({err}): every process compiles its kernels itself. "
            "Set CUTE_ATTN_CACHE_DIR to a writable directory.",
            stacklevel=2,
        )
