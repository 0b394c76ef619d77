"""Decorators of public functions: forms with `return_lse=True`, and names of arguments that FlashInfer has changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from cute_attn.errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")

RENAMED = {
    "allow_fp16_qk_reduction": "use_fp16_qk_reduction",
    "head_dim": "head_dim_qk",
    "qk_indptr_buf": "mask_indptr_buf",
}


def accepts_older_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function`, declared with the current argument names, to accept FlashInfer's older names too.

    For constructors and plans. Functions that run once per layer declare the older name as one more argument instead:
    this frame would cost them 0.2 us.
    """
    names = inspect.signature(function).parameters
    renamed = [(old, new) for old, new in RENAMED.items() if new in names]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        for old, new in renamed:
            if old in kwargs:
                if new in kwargs:
                    raise ArgumentTypeError(f"{old} and {new} are two names of one argument: give one of them")
                kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return wrapper


def with_return_lse(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with `return_lse=True` as the default, and with its own name, signature and docstring."""

    @functools.wraps(function)
    def wrapper(*args: Any, return_lse: bool = True, **kwargs: Any) -> R:
        kwargs["return_lse"] = return_lse
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    flag = signature.parameters["return_lse"].replace(default=True)
    changed = {**signature.parameters, "return_lse": flag}
    wrapper.__dict__["__signature__"] = signature.replace(parameters=tuple(changed.values()))
    wrapper.__name__ = f"{function.__name__}_return_lse"
    wrapper.__qualname__ = f"{function.__qualname__}_return_lse"
    wrapper.__doc__ = f"`{function.__name__}` with `return_lse=True` as default.\n\n{inspect.getdoc(function)}"
    return cast("Callable[P, R]", wrapper)


class NotCopied:
    """A wrapper that `copy` and `pickle` refuse."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse `copy.copy`, `copy.deepcopy` and pickling."""
        raise ArgumentTypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it holds the schedules that its launches read. "
            "Construct another wrapper and plan it"
        )


class EndsForward(NotCopied):
    """A wrapper with FlashInfer's older methods `begin_forward` and `forward`."""

    def end_forward(self) -> None:
        """Do nothing. Callers of FlashInfer's older `begin_forward` and `forward` end with it."""
