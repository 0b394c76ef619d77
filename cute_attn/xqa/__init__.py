"""Decode over paged caches of 16, 8 and 4 bits (FlashInfer's XQA functions).

`cute_attn.xqa` is this module and, as FlashInfer's `flashinfer.xqa`, the function `cute_attn.xqa.xqa`: it can be
called.
"""

import sys
from types import ModuleType
from typing import Any

from cute_attn.xqa.decode import xqa, xqa_batch_decode_with_kv_cache
from cute_attn.xqa.trtllm import trtllm_batch_decode_with_kv_cache

__all__ = ["trtllm_batch_decode_with_kv_cache", "xqa", "xqa_batch_decode_with_kv_cache"]


class _CallableModule(ModuleType):
    """A module with the call of its function `xqa`."""

    __wrapped__ = staticmethod(xqa)  # for `inspect.signature`

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        xqa(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
