"""vLLM's attention backend `CUTE_ATTN`: `vllm serve MODEL --attention-backend CUTE_ATTN`.

vLLM finds `register` by the entry point `cute_attn` of the group `vllm.general_plugins`, in every process. Nothing else
of this package is imported until the backend is selected.

`support.py`, `cache.py`, `metadata.py` and `attention.py` need torch only; `backend.py`, `builder.py` and `impl.py` are
the classes that vLLM asks for.
"""

from __future__ import annotations

import logging

NAME = "CUTE_ATTN"
BACKEND = "cute_attn.integrations.vllm.backend.CuteAttnBackend"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend under the name `CUTE_ATTN`, once; further calls have no effect.

    Never raises: where vLLM's registry is missing or refuses the name, that is logged, and vLLM runs without this
    backend.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if NAME not in AttentionBackendEnum.__members__:
            register_backend(NAME, BACKEND)
    except Exception:  # whatever it is, it must not end a vLLM that may not even want this backend
        logger.warning("attention backend %s was not registered with vLLM", NAME, exc_info=True)
