"""Variants of persistent kernels that the compile gate builds: fields of `PersistentSpec`."""

from __future__ import annotations

from typing import Any

# Score and mask variants; the first needs more registers than any other.
MODIFIED: tuple[dict[str, Any], ...] = (
    {"mask": "packed", "scores": ("scale", "alibi", "soft_cap")},
    {"mask": "packed"},
    {"mask": "band"},
    {"scores": ("scale", "soft_cap")},
)
ITEMS: dict[str, Any] = {"schedule": "items", "kv": "paged"}
GATHERED: dict[str, Any] = {"schedule": "items", "kv": "gathered"}
