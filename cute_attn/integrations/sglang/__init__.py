"""SGLang plug-in: an attention backend that `--attention-backend cute_attn` selects.

SGLang finds `register` through the entry point `sglang.srt.plugins` of this package and calls it in every process
before it reads its command line. Nothing of cute_attn's kernels is imported until the backend is built.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "cute_attn"
TESTED_VERSION = "0.5.23"

_logger = logging.getLogger(__name__)


def register() -> None:
    """Add the backend `cute_attn` to SGLang's registry and to the choices of its command line.

    May be called any number of times. An SGLang without these extension points is left as it is, with a warning in the
    log: a plug-in that is not selected must not stop a server.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        _logger.warning(
            "cute_attn: no attention backend registered, SGLang's extension points moved (%s); tested with SGLang %s",
            error,
            TESTED_VERSION,
        )
        return
    for known, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in known:
            add([NAME])
    register_attention_backend(NAME)(build)


def build(runner: Any) -> Any:
    """Build the attention backend for one of SGLang's model runners.

    Raises
    ------
    NotSupported (a NotImplementedError) that lists every setting of the server and of the model that is refused.
    """
    if runner.use_mla_backend:
        from cute_attn.integrations.sglang.mla_backend import CuteAttnMLABackend

        return CuteAttnMLABackend(runner)
    from cute_attn.integrations.sglang.backend import CuteAttnBackend

    return CuteAttnBackend(runner)
