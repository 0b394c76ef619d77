"""Dtypes, element sizes and the line size that all kernel families share."""

from __future__ import annotations

DTYPES = ("float16", "bfloat16")


FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")


OUT_DTYPES = (*DTYPES, "float32")


KV_BITS = {"": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "nvfp4": 4}  # of an element; "": q's dtype


LINE = 128  # bytes; rows are whole lines, see `blocks.smem`
