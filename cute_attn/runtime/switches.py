"""Environment variables that turn something on. Imports nothing but `os`."""

from __future__ import annotations

import os

DISABLE_JIT = "CUTE_ATTN_DISABLE_JIT"
VALIDATE = "CUTE_ATTN_VALIDATE"


def is_on(name: str) -> bool:
    """Tells whether the variable is set, and neither empty nor 0."""
    return os.environ.get(name, "0") not in ("", "0")


_VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # a lookup takes 30 ns, `os.environ.get` of an unset variable 900
_VALIDATE = os.fsencode(VALIDATE)


def validates() -> bool:
    """Tells whether `CUTE_ATTN_VALIDATE` is on; cheap enough for every call of a decode function."""
    return _VARIABLES.get(_VALIDATE, b"0") not in (b"", b"0")
