"""The torch reference as a backend: CPU tensors, and any device where it is asked for by name."""

from __future__ import annotations

from collections.abc import Callable

from cute_attn import reference
from cute_attn.problem import Features, Problem


def prepare(features: Features) -> Callable[[Problem], None]:
    return reference.run
