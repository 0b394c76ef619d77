"""On-disk cache of artifacts: one file per spec, arch, kernel sources and DSL version.

Processes may share it: a lock file per key is held during a compile, files appear by `os.replace`, and a damaged
file counts as a miss. The directory is `$CUTE_ATTN_CACHE_DIR`, else `$XDG_CACHE_HOME/cute_attn`, else
`~/.cache/cute_attn`. A cache that cannot be written costs a warning and the time to compile. So does one that is not
private: cubins are code, so the directory and its files must belong to this user or root, and nobody else may write to
them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from cute_attn.errors import ArtifactError
from cute_attn.runtime import dsl
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec

_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    *("kernels/**/*.py", "schedule/records.py", "schedule/constants.py"),
    *("runtime/spec.py", "runtime/compile.py", "runtime/cubin.py", "runtime/artifact.py"),
)
# Files and folders of kernels/ that only choose specs and parameters.
_HOST_ONLY = ("tiles.py", "catalog.py", "default_specs.py", "host")
_warned: set[str] = set()


class NotPrivate(OSError):
    """A directory or file of the cache belongs to another user, or others may write to it."""


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


def directory() -> Path:
    """Returns the absolute path of the cache, which need not exist yet."""
    chosen = os.environ.get("CUTE_ATTN_CACHE_DIR")
    if not chosen:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if base.startswith("~"):  # a user without a home: expanduser changes nothing
            return Path(base, "cute_attn")
        chosen = os.path.join(base, "cute_attn")
    return Path(chosen).absolute()


def key_of(spec: KernelSpec, arch: str, dsl_version: str) -> str:
    """Returns the key of an artifact that this version and flavour of the DSL compiles from the package's sources."""
    return hashlib.sha256("\0".join((spec.key(), arch, source_fingerprint(), dsl_version)).encode()).hexdigest()


def cache_key(spec: KernelSpec, arch: str) -> str | None:
    """Returns the key of an artifact in the cache; None without an installed DSL."""
    version = dsl.version()
    return version and key_of(spec, arch, version)


def path_of(key: str) -> Path:
    return directory() / f"{key}.artifact"


def load(key: str) -> Artifact | None:
    """Returns the cached artifact; None if it is absent, unreadable, damaged or not private."""
    try:
        check_private(directory(), os.stat(directory()))
        with open(path_of(key), "rb") as file:
            check_private(path_of(key), os.fstat(file.fileno()))
            return Artifact.from_bytes(file.read())
    except NotPrivate as err:
        _warn_once(err)
    except (OSError, ArtifactError):
        pass
    return None


def check_private(path: Path, found: os.stat_result) -> None:
    """Raises NotPrivate unless `path` belongs to this user or root and nobody else may write to it."""
    if found.st_uid not in _trusted_users():
        raise NotPrivate(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivate(f"other users may write to {path}: chmod go-w {path}")


def _trusted_users() -> tuple[int, ...]:
    return os.geteuid(), 0


def store(key: str, artifact: Artifact) -> None:
    """Puts `artifact` into the cache. Readers see the whole file or none."""
    try:
        _make_directory()
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
    """Holds the lock of `key` among processes; does nothing without a writable, private cache."""
    from filelock import FileLock  # here, because `doctor` runs where it is not installed

    with contextlib.ExitStack() as stack:
        try:
            _make_directory()
            stack.enter_context(FileLock(directory() / f"{key}.lock"))
        except OSError as err:
            _warn_once(err)
        yield


def _make_directory() -> None:
    if not directory().is_absolute():
        raise OSError("no home directory")
    directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory(), os.stat(directory()))


def _warn_once(err: OSError) -> None:
    if str(directory()) not in _warned:
        _warned.add(str(directory()))
        warnings.warn(
            f"cute_attn cannot use its cache in {directory()} ({err}): every process compiles its kernels itself. "
            "Set CUTE_ATTN_CACHE_DIR to a writable directory that only you may write to.",
            stacklevel=2,
        )
