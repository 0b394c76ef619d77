"""Checks of options that steps of an engine repeat: made once, and their results kept."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch

IMMUTABLE = (numbers.Number, str, torch.dtype, type(None))
CACHE_SIZE = 256  # results: more than the layers of a model have

T = TypeVar("T")


def once(trusted: int = 0) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a pure function of positional arguments, the first `trusted` of which do not come from the user, to be
    computed once for equal arguments of equal types: 1, 1.0 and True are equal, but no option takes all three. Errors
    are not kept, nor results of arguments that have no hash, may change their value or are large. The memo is `kept` of
    the result.
    """

    def decorated(check: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(CACHE_SIZE, typed=True)
        def kept(*arguments: Any) -> T:
            if not all(isinstance(argument, IMMUTABLE) for argument in arguments[trusted:]):
                raise TypeError("an argument may change its value, or is large: a tensor, an array, any object")
            return check(*arguments)

        @functools.wraps(check)
        def checked(*arguments: Any) -> T:
            try:
                return kept(*arguments)
            except TypeError:  # an argument has no hash, is wrong, or must not be kept
                pass
            return check(*arguments)

        checked.__dict__["kept"] = kept
        return checked

    return decorated
