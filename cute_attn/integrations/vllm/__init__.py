"""vLLM's attention backends `CUTE_ATTN` and, for models with latent attention, `CUTE_ATTN_MLA`:
`vllm serve MODEL --attention-backend CUTE_ATTN`.

vLLM finds `register` by the entry point `cute_attn` of the group `vllm.general_plugins`, in every process. Nothing else
of this package is imported until a backend is selected.

`support.py`, `cache.py`, `metadata.py` and `attention.py` need torch only; `backend.py` and `mla.py` are the classes
that vLLM asks for.
"""

from __future__ import annotations

import logging

NAME = "CUTE_ATTN"
BACKEND = "cute_attn.integrations.vllm.backend.CuteAttnBackend"
MLA_NAME = "CUTE_ATTN_MLA"  # of its own: in vLLM a backend is for latent attention or for the other
MLA_BACKEND = "cute_attn.integrations.vllm.mla.CuteAttnMLABackend"
MLA_PREFILL_BACKEND = "cute_attn.integrations.vllm.mla.CuteAttnMLAPrefillBackend"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backends under their names, once; further calls have no effect. The prefill of models with latent
    attention has a registry of its own, in which it is `CUTE_ATTN_MLA` too.

    Never raises: where vLLM's registry is missing or refuses a name, that is logged, and vLLM runs without these
    backends.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        for name, path in ((NAME, BACKEND), (MLA_NAME, MLA_BACKEND)):
            if name not in AttentionBackendEnum.__members__:
                register_backend(name, path)
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

        if MLA_NAME not in MLAPrefillBackendEnum.__members__:
            register_mla_prefill_backend(MLA_NAME, MLA_PREFILL_BACKEND)
    except Exception:  # whatever it is, it must not end a vLLM that may not even want these backends
        logger.warning("attention backends %s and %s were not registered with vLLM", NAME, MLA_NAME, exc_info=True)
