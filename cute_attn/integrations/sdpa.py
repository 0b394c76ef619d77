"""torch's `scaled_dot_product_attention` and `varlen_attn` on the kernels of cute_attn, forward only.

`activate()`, or where torch has a registry of implementations (2.13 has) with this module imported
`torch.nn.attention.activate_flash_attention_impl("cute_attn")`. Afterwards every call that torch sends to its flash
backend on a CUDA device runs here; what torch sends elsewhere (masks, head dimensions above 256, the math backend)
stays there. `torch.nn.attention.sdpa_kernel` works as before. `docs/torch.md` has the limits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import attention

from cute_attn.integrations import aten_flash

NAME = "cute_attn"
OVERRIDES: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": aten_flash.scaled_dot_product_flash_attention,
    "_flash_attention_forward": aten_flash.flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": aten_flash.flash_attention_into,
    "_scaled_dot_product_flash_attention_backward": aten_flash.refuse_backward,
    "_flash_attention_backward": aten_flash.refuse_backward,
}


class Override:
    """aten's flash attention operators replaced by ours, until `remove`."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, function in OVERRIDES.items():
                if hasattr(torch.ops.aten, name):
                    self._library.impl(name, function, dispatch_key)

    def remove(self) -> None:
        """Restore torch's own kernels."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


_override: Override | None = None  # where torch has no registry


def activate() -> None:
    """Send torch's flash attention to cute_attn. Repeated calls change nothing.

    Where torch has a registry of flash attention implementations (`torch.nn.attention.activate_flash_attention_impl`),
    this activates "cute_attn" there, in place of another implementation.
    """
    global _override
    if _registry("activate_flash_attention_impl") is not None:
        if _registry("current_flash_attention_impl")() != NAME:
            _registry("activate_flash_attention_impl")(NAME)
    elif _override is None:
        _override = Override()


def deactivate() -> None:
    """Restore torch's own flash attention, if cute_attn is active."""
    global _override
    if _registry("activate_flash_attention_impl") is not None:
        if is_active():
            _registry("restore_flash_attention_impl")()
    elif _override is not None:
        _override.remove()
        _override = None


def is_active() -> bool:
    """Tell whether torch's flash attention is cute_attn's."""
    current = _registry("current_flash_attention_impl")
    return _override is not None if current is None else current() == NAME


def _registry(name: str) -> Any:
    """Return a function of torch's registry; None where this torch has not all of it."""
    names = "register", "activate", "restore", "current"
    complete = all(hasattr(attention, f"{verb}_flash_attention_impl") for verb in names)
    return getattr(attention, name) if complete else None


if hasattr(attention, "register_flash_attention_impl"):
    attention.register_flash_attention_impl(NAME, register_fn=Override)
