"""NVTX ranges around public calls, for Nsight Systems."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from cute_attn.observe.hooks import Call
from cute_attn.runtime import switches


def available() -> bool:
    """Tells whether torch has NVTX; a warning says if not."""
    try:
        torch.cuda.nvtx.range_push("cute_attn")
        torch.cuda.nvtx.range_pop()
    except (RuntimeError, AttributeError) as error:
        warnings.warn(f"{switches.NVTX} has no effect: this build of torch has no NVTX ({error})", stacklevel=2)
        return False
    return True


def ranges(call: Call, proceed: Callable[[], Any]) -> Any:
    """Runs a call inside a range of its name: "cute_attn.single_decode_with_kv_cache", "cute_attn.Wrapper.run"."""
    torch.cuda.nvtx.range_push(f"cute_attn.{call.name}")
    try:
        return proceed()
    finally:
        torch.cuda.nvtx.range_pop()
