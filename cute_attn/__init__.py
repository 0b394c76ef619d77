"""Attention kernels in CuTe DSL for NVIDIA GPUs, with FlashInfer's attention API.

Everything that users call is here; `cute_attn.prefill`, `.decode`, `.mla`, `.attention`, `.cascade`, `.sparse`,
`.page`, `.concat_ops`, `.quantization` and `.utils` hold it under the names of FlashInfer's modules. CPU tensors run
the same calls on a torch reference.

The first use of a name loads the library: engines import every plug-in that is installed, whether they use it or not.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_attn.exports import *  # noqa: F403

__version__ = "0.2.0"

_MODULES = (
    *("attention", "cascade", "concat_ops", "decode", "flash_mla", "mla", "page", "prefill", "quantization", "sparse"),
    *("utils", "xqa"),
)


def __getattr__(name: str) -> Any:
    """Load the public modules, and return a name of theirs, or one of them."""
    unknown = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("__") and name != "__all__":  # importers and `inspect` ask for these
        raise unknown
    try:
        exports = importlib.import_module("cute_attn.exports")
    except ImportError as error:
        # Without torch there is no API, but `python -m cute_attn doctor` must say so, and artifacts are plain data.
        raise ImportError(f"cute_attn.{name} is not available: {error}") from error
    names = getattr(exports, "__all__", None)  # None: being loaded
    if names is not None:
        globals().update({exported: getattr(exports, exported) for exported in names}, __all__=list(names))
    if name in _MODULES:
        return importlib.import_module(f"cute_attn.{name}")
    if name not in globals():
        raise unknown
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), *_MODULES})


if os.environ.get("CUTE_ATTN_DUMP") or os.environ.get("CUTE_ATTN_NVTX"):  # before any module takes a function by name
    importlib.import_module("cute_attn.observe").install(__version__)
