"""torch's `scaled_dot_product_attention` and `varlen_attn` on the kernels of cute_attn, forward only.

`activate()`, or with this module imported `torch.nn.attention.activate_flash_attention_impl("cute_attn")`. Afterwards
every call that torch sends to its flash backend on a CUDA device runs here; what torch sends elsewhere (masks, head
dimensions above 256, the math backend) stays there. `torch.nn.attention.sdpa_kernel` works as before. `docs/torch.md`
has the limits.
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


def activate() -> None:
    """Send torch's flash attention to cute_attn, in place of another implementation. Repeated calls change nothing."""
    if not is_active():
        attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Restore torch's own flash attention, if cute_attn is active."""
    if is_active():
        attention.restore_flash_attention_impl()


def is_active() -> bool:
    """Tell whether torch's flash attention is cute_attn's."""
    return attention.current_flash_attention_impl() == NAME


attention.register_flash_attention_impl(NAME, register_fn=Override)
