"""FlashInfer renamed arguments and inserted some between others; both generations of calls work here.

Keywords are unambiguous. Positional arguments after `v` are not: they follow either order below, and what
they are tells which.
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

SEED_PREFILL = (
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
TODAY_PREFILL = (
    "scale_q",
    "scale_k",
    "scale_v",
    "o_dtype",
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
    "backend",
    "return_lse",
    "kv_cache_sf",
    "k_scale",
    "v_scale",
)


def both_prefill_spellings(function: Callable[P, R]) -> Callable[P, R]:
    """Let `function`, declared in today's order with today's names, take seed calls too."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        if "allow_fp16_qk_reduction" in kwargs:
            rename(kwargs, "allow_fp16_qk_reduction", "use_fp16_qk_reduction")
        if len(args) > 3:
            kwargs = name_in_order(prefill_order(args[3:]), args[3:], kwargs, "v")
            args = args[:3]
        return function(*args, **kwargs)

    return wrapper


def returning_lse(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with `return_lse=True` as its default, under its own name and signature."""

    @functools.wraps(function)
    def wrapper(*args: Any, return_lse: bool = True, **kwargs: Any) -> R:
        kwargs["return_lse"] = return_lse
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    flag = signature.parameters["return_lse"].replace(default=True)
    changed = {**signature.parameters, "return_lse": flag}
    wrapper.__dict__["__signature__"] = signature.replace(parameters=tuple(changed.values()))
    wrapper.__name__ = wrapper.__qualname__ = f"{function.__name__}_return_lse"
    wrapper.__doc__ = f"`{function.__name__}` with `return_lse=True` as default.\n\n    {function.__doc__}"
    return cast("Callable[P, R]", wrapper)


def rename(kwargs: dict[str, Any], old: str, new: str) -> None:
    if new in kwargs:
        raise ArgumentTypeError(f"{old} and {new} are two names of one argument: give one of them")
    kwargs[new] = kwargs.pop(old)


def name_in_order(order: tuple[str, ...], extra: tuple[Any, ...], kwargs: dict[str, Any], last: str) -> dict[str, Any]:
    """Keywords for the positional arguments after `last`, added to those given."""
    if len(extra) > len(order):
        raise ArgumentTypeError(f"at most {len(order)} positional arguments may follow {last}, got {len(extra)}")
    named = dict(zip(order, extra, strict=False))
    for name in named:
        if name in kwargs:
            raise ArgumentTypeError(f"{name} was given twice: by position and by keyword")
    return {**named, **kwargs}


def prefill_order(extra: tuple[Any, ...]) -> tuple[str, ...]:
    """The order that the positional arguments after `v` follow."""
    at = dict(enumerate(extra)).get
    masks = [value for value in extra[:2] if is_tensor(value, torch.bool, torch.uint8)]
    scales = [value for value in extra[:3] if is_tensor(value, torch.float32) and value.dim() == 1]
    seed = type(at(2)) is bool or isinstance(at(3), str) or bool(masks)
    today = isinstance(at(3), torch.dtype) or type(at(6)) is bool or bool(scales)
    today = today or any(isinstance(value, torch.Tensor) for value in extra[4:6])  # today's masks
    if seed != today:
        return SEED_PREFILL if seed else TODAY_PREFILL
    if not seed and all(value is None for value in extra):
        return TODAY_PREFILL
    index, value = next((i, value) for i, value in enumerate(extra) if value is not None)
    seed_name = SEED_PREFILL[index] if index < len(SEED_PREFILL) else "nothing"
    raise ArgumentTypeError(
        f"positional argument {index + 3} is {seed_name} in the seed order "
        f"(q, k, v, {', '.join(SEED_PREFILL[:4])}, ...) and {TODAY_PREFILL[min(index, 19)]} in today's order "
        f"(q, k, v, {', '.join(TODAY_PREFILL[:7])}, ...), and the arguments do not tell which is meant; "
        f"got {describe(value)}: pass it by keyword"
    )


def is_tensor(value: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes
