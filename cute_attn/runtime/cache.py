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
import json
import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cute_attn.errors import ArtifactError
from cute_attn.runtime import dsl, switches
from cute_attn.runtime.artifact import Artifact
from cute_attn.runtime.spec import KernelSpec

_PACKAGE = Path(__file__).parents[1]
_KERNELS = "kernels"
_OTHER_SOURCES = (
    *("schedule/records.py", "schedule/constants.py"),
    *("runtime/spec.py", "runtime/compile.py", "runtime/cubin.py", "runtime/artifact.py"),
)
# Files and folders of kernels/ that only choose specs and parameters.
_HOST_ONLY = {"tiles.py", "catalog.py", "default_specs.py", "host"}
NOWHERE = "there is no home or working directory"
_warned: set[str] = set()


class NotPrivate(OSError):
    """A directory or file of the cache belongs to another user, or others may write to it."""


@functools.cache
def source_fingerprint() -> str:
    """Returns the sha256 of all sources that affect an artifact: the kernels, and the code that compiles them."""
    digest = hashlib.sha256()
    for name in sorted(_sources()):
        with open(os.path.join(_PACKAGE, name), "rb") as file:
            content = file.read()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources() -> Iterator[str]:
    """Yields the sources' paths in the package. As texts: `Path` takes twice the time of reading them all."""
    yield from _OTHER_SOURCES
    for path, folders, files in os.walk(_PACKAGE / _KERNELS):
        folders[:] = {*folders} - _HOST_ONLY
        folder = os.path.relpath(path, _PACKAGE).replace(os.sep, "/")
        yield from (f"{folder}/{name}" for name in {*files} - _HOST_ONLY if name.endswith(".py"))


def directory() -> Path:
    """Returns the absolute path of the cache, which need not exist yet. A relative one, which is not used, means that
    it lies in a home or working directory that there is not.
    """
    chosen = os.environ.get(switches.CACHE_DIR)
    if not chosen:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if base.startswith("~"):  # a user without a home: expanduser changes nothing
            return Path(base, "cute_attn")
        chosen = os.path.join(base, "cute_attn")
    try:
        return Path(chosen).absolute()
    except OSError:  # the working directory was removed
        return Path(chosen)


def key_of(spec: str, arch: str, dsl_version: str) -> str:
    """Returns the key of an artifact that this version and flavour of the DSL compiles from the package's sources.
    `spec`: its canonical text.
    """
    return hashlib.sha256("\0".join((spec, arch, source_fingerprint(), dsl_version)).encode()).hexdigest()


def key_of_artifact(made: Artifact) -> str:
    """Returns the key of an artifact that the package's sources have made."""
    return key_of(json.dumps(made.spec, sort_keys=True, separators=(",", ":")), made.arch, made.dsl)


def cache_key(spec: KernelSpec, arch: str) -> str | None:
    """Returns the key of an artifact in the cache; None without an installed DSL."""
    version = dsl.version()
    return version and key_of(spec.key(), arch, version)


def path_of(key: str) -> Path:
    return directory() / f"{key}.artifact"


def load(key: str, spec: KernelSpec, arch: str) -> Artifact | None:
    """Returns the cached artifact; None if it is absent, unreadable, damaged, not private, or another one."""
    try:
        check_private(directory(), os.stat(directory()))
        found = Artifact.from_bytes(read_private(path_of(key)))
        return found if found.is_of(spec, arch) else None
    except (NotPrivate, PermissionError) as err:
        _warn_once(err)
    except (OSError, ArtifactError):
        pass
    return None


class Entry(NamedTuple):
    """A file of the cache. `current`: made from the present kernel sources by the installed DSL; others are never read
    again, unless sources or DSL come back.
    """

    path: Path
    num_bytes: int
    arch: str
    kernel: str
    current: bool
    problem: str  # why it cannot be loaded, or ""
    damaged: bool  # it was read, and is no artifact


def entries() -> Iterator[Entry]:
    """Yields the artifacts of the cache, in the order of their names. Nothing is read of a file that somebody else
    could have written.
    """
    for path in sorted(directory().glob("*.artifact")):
        try:
            yield _entry(path)
        except FileNotFoundError:  # removed meanwhile
            continue


def _entry(path: Path) -> Entry:
    num_bytes = path.lstat().st_size
    try:
        check_private(path.parent, path.parent.stat())
        if not path.is_file() and path.exists():  # reading a pipe would wait
            raise OSError("not a file")
        found = Artifact.from_bytes(read_private(path))
        kernel = found.spec["kernel"]
        if not all(type(name) is str and name.isprintable() for name in (found.arch, kernel, found.dsl)):
            raise ArtifactError("arch, kernel and dsl must be printable texts")
        current = found.dsl == dsl.version() and path.stem == key_of_artifact(found)
    except FileNotFoundError:
        raise
    except (OSError, ArtifactError, KeyError) as error:
        damaged = not isinstance(error, OSError)
        return Entry(path, num_bytes, "?", "?", False, str(error) or repr(error), damaged)
    return Entry(path, num_bytes, found.arch, kernel, current, "", False)


def remove(chosen: Iterable[Entry]) -> None:
    """Removes artifacts and their lock files. A process that compiles one meanwhile may leave another."""
    for entry in chosen:
        entry.path.unlink(missing_ok=True)
        entry.path.with_suffix(".lock").unlink(missing_ok=True)


def check_private(path: Path, found: os.stat_result) -> None:
    """Raises NotPrivate unless `path` belongs to this user or root and nobody else may write to it."""
    if found.st_uid not in _trusted_users():
        raise NotPrivate(f"{path} belongs to user {found.st_uid}, not to this one or root")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivate(f"other users may write to {path}: chmod go-w {path}")


def read_private(path: Path) -> bytes:
    """Returns the content of a file; NotPrivate if somebody else could have written it."""
    with open(path, "rb") as file:
        check_private(path, os.fstat(file.fileno()))
        return file.read()


def _trusted_users() -> tuple[int, ...]:
    return os.geteuid(), 0


def store(key: str, made: Artifact) -> None:
    """Puts an artifact into the cache. Readers see the whole file or none."""
    try:
        _make_directory()
        write_atomically(path_of(key), made.to_bytes())
    except OSError as err:
        _warn_once(err)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to `path` through a temporary file in the same directory. Others may read it, if the umask lets
    them: root makes bundles and caches for everyone. None of them may write to it.
    """
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
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
        raise OSError(NOWHERE)
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
