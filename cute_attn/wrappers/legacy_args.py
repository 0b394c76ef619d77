"""FlashInfer's older names and positional orders of arguments, accepted besides the current ones.

FlashInfer renamed arguments and inserted new ones between others. Keywords are unambiguous. Positional arguments after
`v` may follow either order below; their types tell which, and a call whose types do not is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from cute_attn.errors import ArgumentTypeError
from cute_attn.request.checks import describe

P = ParamSpec("P")
R = TypeVar("R")

LEGACY_PREFILL_ORDER = (
    "custom_mask",
    "packed_custom_mask",
    "causal",
    "kv_layout",
    "pos_encoding_mode",
    "use_fp16_qk_reduction",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "rope_scale",
    "rope_theta",
)
PREFILL_ORDER = (
    *("scale_q", "scale_k", "scale_v", "o_dtype"),
    *LEGACY_PREFILL_ORDER,
    *("backend", "return_lse", "kv_cache_sf", "k_scale", "v_scale"),
)


def accepts_legacy_order(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a prefill function, declared in the current order, to accept FlashInfer's older argument order too."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        if "allow_fp16_qk_reduction" in kwargs:
            rename_keyword(kwargs, "allow_fp16_qk_reduction", "use_fp16_qk_reduction")
        if len(args) > 3:
            kwargs = positionals_to_keywords(detect_prefill_order(args[3:]), args[3:], kwargs, "v")
            args = args[:3]
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


def rename_keyword(kwargs: dict[str, Any], old: str, new: str) -> None:
    """Move `kwargs[old]` to `kwargs[new]`; ArgumentTypeError if both are present."""
    if new in kwargs:
        raise ArgumentTypeError(f"{old} and {new} are two names of one argument: give one of them")
    kwargs[new] = kwargs.pop(old)


def positionals_to_keywords(
    order: tuple[str, ...], extra: tuple[Any, ...], kwargs: dict[str, Any], last: str
) -> dict[str, Any]:
    """Return `kwargs` with the positional arguments after `last` added under the names of `order`."""
    if len(extra) > len(order):
        raise ArgumentTypeError(f"at most {len(order)} positional arguments may follow {last}, got {len(extra)}")
    named = dict(zip(order, extra, strict=False))
    for name in named:
        if name in kwargs:
            raise ArgumentTypeError(f"{name} was given twice: by position and by keyword")
    return {**named, **kwargs}


def detect_prefill_order(extra: tuple[Any, ...]) -> tuple[str, ...]:
    """Tell from their types which order the positional arguments after `v` follow."""
    at = dict(enumerate(extra)).get  # None past the end
    is_legacy = (
        any(is_tensor(value, torch.bool, torch.uint8) for value in extra[:2])  # custom_mask, packed_custom_mask
        or type(at(2)) is bool  # causal
        or isinstance(at(3), str)  # kv_layout
    )
    is_current = (
        any(is_tensor(value, torch.float32) and value.dim() == 1 for value in extra[:3])  # scale_q, scale_k, scale_v
        or isinstance(at(3), torch.dtype)  # o_dtype
        or any(isinstance(value, torch.Tensor) for value in extra[4:6])  # custom_mask, packed_custom_mask
        or type(at(6)) is bool  # causal
    )
    if is_legacy != is_current:
        return LEGACY_PREFILL_ORDER if is_legacy else PREFILL_ORDER
    if not is_legacy and all(value is None for value in extra):
        return PREFILL_ORDER
    raise unclear_order(extra, "v", LEGACY_PREFILL_ORDER, PREFILL_ORDER)


def unclear_order(
    extra: tuple[Any, ...], last: str, legacy_order: tuple[str, ...], current_order: tuple[str, ...]
) -> ArgumentTypeError:
    """Return the error for positional arguments after `last` whose types do not tell which order they follow."""
    index, value = next((i, value) for i, value in enumerate(extra) if value is not None)
    legacy_name, current_name = (
        dict(enumerate(order)).get(index, "nothing") for order in (legacy_order, current_order)
    )
    return ArgumentTypeError(
        f"positional argument {index + 1} after {last} is {legacy_name} in FlashInfer's older argument order "
        f"({last}, {', '.join(legacy_order[:4])}, ...) and {current_name} in the current order "
        f"({last}, {', '.join(current_order[:7])}, ...), and the types of the arguments do not tell which order is "
        f"meant; got {describe(value)}: pass it by keyword"
    )


def is_tensor(value: Any, *dtypes: torch.dtype) -> bool:
    """Tell whether `value` is a tensor of one of `dtypes`."""
    return isinstance(value, torch.Tensor) and value.dtype in dtypes
