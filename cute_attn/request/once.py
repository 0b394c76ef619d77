"""Checks of options that steps of an engine repeat: made once, and their results kept."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

IMMUTABLE = (numbers.Number, str, torch.dtype, type(None))
CACHE_SIZE = 256  # results: more than the layers of a model have

T = TypeVar("T")


class Once(Generic[T]):
    """A pure function, computed once for equal arguments of equal types: 1, 1.0 and True are equal, but no option takes
    all three. Errors are not kept, nor results of arguments that have no hash, may change their value or are large.
    """

    def __init__(self, check: Callable[..., T], trusted: int) -> None:
        @functools.lru_cache(CACHE_SIZE, typed=True)
        def kept(*arguments: Any) -> T:
            if not all(isinstance(argument, IMMUTABLE) for argument in arguments[trusted:]):
                raise TypeError("an argument may change its value, or is large: a tensor, an array, any object")
            return check(*arguments)

        functools.update_wrapper(self, check)
        self.check, self.kept = check, kept

    def __call__(self, *arguments: Any) -> T:
        """Return what the function returns."""
        try:
            return self.kept(*arguments)
        except TypeError:  # an argument has no hash, is wrong, or must not be kept
            pass
        return self.check(*arguments)


def once(trusted: int = 0) -> Callable[[Callable[..., T]], Once[T]]:
    """Decorate a function of positional arguments, the first `trusted` of which do not come from the user."""
    return functools.partial(Once, trusted=trusted)
