"""Environment variables that turn something on. Imports nothing but `os`."""

from __future__ import annotations

import os

DISABLE_JIT = "CUTE_ATTN_DISABLE_JIT"
VALIDATE = "CUTE_ATTN_VALIDATE"


def is_on(name: str) -> bool:
    """Tells whether the variable is set, and neither empty nor 0."""
    return os.environ.get(name, "0") not in ("", "0")
