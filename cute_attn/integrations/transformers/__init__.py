"""cute_attn as an attention implementation of Hugging Face transformers (5.0 or later).

    >>> from cute_attn.integrations.transformers import register
    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="cute_attn")

For inference: `docs/integrations/transformers.md` says what runs on which kernel, and what is refused.
"""

from __future__ import annotations

import functools
from typing import Any

from cute_attn.dispatch import select
from cute_attn.errors import ArgumentError, ArgumentTypeError

__all__ = ["register"]

OLDEST = (5, 0)
_registered: dict[str, Any] = {}


def register(name: str = "cute_attn", backend: str = "auto") -> None:
    """Register cute_attn's attention and masks with transformers, for `attn_implementation=name`.

    May be called again: the same name and backend change nothing, another backend replaces the first one.

    Parameters
    ----------
    name : default "cute_attn". No name of another implementation, and without "flash", "|" or "/", which transformers
        takes for packages to import or kernels to download.
    backend : "auto" (default) or another backend of the batch wrappers: "fa3", "fa2", "reference", "emulator", ...

    Raises
    ------
    ImportError (transformers is missing, or older than 5.0), ArgumentError, ArgumentTypeError (`name`), LayoutError
    (`backend`).
    """
    _check_transformers()
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, got {type(name).__name__}")
    if not name or any(part in name for part in ("flash", "|", "/")):
        raise ArgumentError(
            f'name must be without "flash", "|" and "/", got {name!r}: transformers reads them as kernels'
        )
    select.checked_name(backend)
    from transformers import AttentionInterface, AttentionMaskInterface

    from cute_attn.integrations.transformers import forward, masks

    if name not in _registered and name in (*AttentionInterface(), *AttentionMaskInterface(), "eager"):
        raise ArgumentError(f'name must not be that of another implementation, got {name!r}; default "cute_attn"')
    function = forward.attention if backend == "auto" else functools.partial(forward.attention, backend=backend)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, masks.attention_mask)
    _registered[name] = backend


def _check_transformers() -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "cute_attn.integrations.transformers needs transformers: pip install 'transformers>=5.0'"
        ) from error
    found = transformers.__version__
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(f"cute_attn.integrations.transformers needs transformers {wanted} or later, found {found}")
