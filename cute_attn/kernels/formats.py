"""Dtypes, element sizes, the line size, and rules of specs and tiles, that all kernel families share."""

from __future__ import annotations

DTYPES = ("float16", "bfloat16")


FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")


OUT_DTYPES = (*DTYPES, "float32")


KV_BITS = {"": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "nvfp4": 4}  # of an element; "": q's dtype


LINE = 128  # bytes; rows are whole lines, see `blocks.smem`


class Ruled:
    """Record whose fields must agree with its `rules`: what must hold, in words, and whether it does."""

    def rules(self) -> dict[str, bool]:
        return {}

    def __post_init__(self) -> None:
        for rule, holds in self.rules().items():
            if not holds:
                raise ValueError(f"{self}: {rule}")
