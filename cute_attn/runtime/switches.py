"""Environment variables of the library: what each means, which are on and which are misspelled; the level of the logger
"cute_attn", whose messages are written only where results are memoised, so that calls that repeat pay nothing. Imports
the standard library only.
"""

from __future__ import annotations

import difflib
import logging
import os
import warnings

PREFIX = "CUTE_ATTN_"
CACHE_DIR = "CUTE_ATTN_CACHE_DIR"
BUNDLE = "CUTE_ATTN_BUNDLE"
DISABLE_JIT = "CUTE_ATTN_DISABLE_JIT"
VALIDATE = "CUTE_ATTN_VALIDATE"
EMULATE_ARCH = "CUTE_ATTN_EMULATE_ARCH"
LOGLEVEL = "CUTE_ATTN_LOGLEVEL"
DUMP = "CUTE_ATTN_DUMP"
DUMP_MAX_MB = "CUTE_ATTN_DUMP_MAX_MB"
NVTX = "CUTE_ATTN_NVTX"

VARIABLES = {
    CACHE_DIR: "directory of compiled kernels (default `$XDG_CACHE_HOME/cute_attn`, else `~/.cache/cute_attn`)",
    BUNDLE: "bundles of compiled kernels to look into before the cache, separated by `:`",
    DISABLE_JIT: "1: never compile; a kernel that is in no bundle and not in the cache is an error",
    VALIDATE: "1: look at page numbers, and at the lengths of decode calls without a plan, before every launch",
    EMULATE_ARCH: 'GPU that `backend="emulator"` stands in for (default `sm_90a`)',
    LOGLEVEL: "INFO: a line per choice of a backend and per compiled kernel; DEBUG: more (logger `cute_attn`)",
    DUMP: "DIR: a public call that raises leaves a file there for `python -m cute_attn replay`; DIR:all: every call",
    DUMP_MAX_MB: "megabytes of tensor values in such a file (default 1024); larger tensors keep their shapes only",
    NVTX: "1: NVTX ranges around `plan`, `run` and single calls",
}
TESTS_PREFIX = "CUTE_ATTN_TEST_"
OF_TESTS = ("CUTE_ATTN_VLLM_SOURCES",)

LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"

logger = logging.getLogger("cute_attn")


def is_on(name: str) -> bool:
    """Tells whether the variable is set, and neither empty nor 0."""
    return os.environ.get(name, "0") not in ("", "0")


_VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # a lookup takes 30 ns, `os.environ.get` of an unset variable 900
_VALIDATE = os.fsencode(VALIDATE)


def validates() -> bool:
    """Tells whether `CUTE_ATTN_VALIDATE` is on; cheap enough for every call of a decode function."""
    return _VARIABLES.get(_VALIDATE, b"0") not in (b"", b"0")


def unknown() -> dict[str, str | None]:
    """Returns the variables of the environment that look like the library's and are not; to each the name that it may
    stand for.
    """
    found = {}
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name in VARIABLES or name.startswith(TESTS_PREFIX) or name in OF_TESTS:
            continue
        words = {known.removeprefix(PREFIX): known for known in VARIABLES}
        found[name] = next((words[word] for word in difflib.get_close_matches(name[len(PREFIX) :], words, 1)), None)
    return found


def advice(name: str, meant: str | None) -> str:
    """Returns what to say about an unknown variable."""
    known = f"did you mean {meant}?" if meant else f"known are {', '.join(VARIABLES)}"
    return f"{name} is no variable of cute_attn and has no effect: {known}"


def warn_of_unknown() -> None:
    """Warns of unknown variables."""
    for name, meant in unknown().items():
        warnings.warn(advice(name, meant), stacklevel=2)


def configure_log() -> None:
    """Sets the level, if the variable is set, and a handler on stderr unless the program has set up one."""
    text = os.environ.get(LOGLEVEL, "")
    if not text:
        return
    name = text.upper()
    if name not in LOG_LEVELS:
        warnings.warn(f"{LOGLEVEL} must be one of {', '.join(LOG_LEVELS)}, got {text!r}", stacklevel=2)
        return
    logger.setLevel(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT, "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False  # a root logger that is set up later must not repeat the lines


def markdown() -> str:
    """Returns the table of the variables as Markdown."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(("| Environment variable | |", "|---|---|", *rows)) + "\n"
