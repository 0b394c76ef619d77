"""FlashInfer's older argument names and positional orders, for the methods of the batch wrappers.

FlashInfer inserted `head_dim_vo` and `o_data_type` between the arguments of `plan`, and made the scales of `run`
keyword-only. The types of positional arguments tell which order a call follows.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from cute_attn.errors import ArgumentTypeError
from cute_attn.request.checks import describe
from cute_attn.wrappers.legacy_args import is_tensor, positionals_to_keywords, rename_keyword, unclear_order

P = ParamSpec("P")
R = TypeVar("R")

LEGACY_NAMES = {
    "allow_fp16_qk_reduction": "use_fp16_qk_reduction",
    "head_dim": "head_dim_qk",
    "qk_indptr_buf": "mask_indptr_buf",
}
_MASKS_AND_FLAGS = ("custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode", "use_fp16_qk_reduction")
LEGACY_PAGED_PLAN_ORDER = (
    *_MASKS_AND_FLAGS,
    *("sm_scale", "window_left", "logits_soft_cap"),
    *("rope_scale", "rope_theta", "q_data_type", "kv_data_type", "non_blocking"),
)
LEGACY_RAGGED_PLAN_ORDER = (
    *_MASKS_AND_FLAGS,
    *("window_left", "logits_soft_cap", "sm_scale"),
    *("rope_scale", "rope_theta", "q_data_type", "kv_data_type"),
)


def accepts_legacy_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function`, declared with the current argument names, to accept FlashInfer's older names too."""
    names = inspect.signature(function).parameters
    legacy = [(old, new) for old, new in LEGACY_NAMES.items() if new in names]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        for old, new in legacy:
            if old in kwargs:
                rename_keyword(kwargs, old, new)
        return function(*args, **kwargs)

    return wrapper


def accepts_legacy_plan_order(common: int, legacy_order: tuple[str, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a `plan`, declared in the current order, to accept FlashInfer's older argument order and names too.

    The first `common` arguments are the same in both orders; `legacy_order` names those that follow in the older one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        legacy = [(old, new) for old, new in LEGACY_NAMES.items() if new in parameters]
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        current_order = tuple(positional[1 + common :])
        last = positional[common]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            for old, new in legacy:
                if old in kwargs:
                    rename_keyword(kwargs, old, new)
            if len(args) > 1 + common:
                extra, args = args[1 + common :], args[: 1 + common]
                order = detect_plan_order(extra, legacy_order, current_order, last)
                kwargs = positionals_to_keywords(order, extra, kwargs, last)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def detect_plan_order(
    extra: tuple[Any, ...], legacy_order: tuple[str, ...], current_order: tuple[str, ...], last: str
) -> tuple[str, ...]:
    """Tell from their types which order the positional arguments after `last` follow.

    The current order is the older one with the integer head_dim_vo inserted before the masks.
    """
    at = dict(enumerate(extra)).get  # None past the end
    is_current = (
        isinstance(at(0), numbers.Integral)  # head_dim_vo
        or is_tensor(at(1), torch.bool)  # custom_mask
        or isinstance(at(2), torch.Tensor)  # packed_custom_mask
        or type(at(3)) is bool  # causal
        or isinstance(at(4), str)  # pos_encoding_mode
    )
    is_legacy = (
        isinstance(at(0), torch.Tensor)  # custom_mask
        or is_tensor(at(1), torch.uint8)  # packed_custom_mask
        or type(at(2)) is bool  # causal
        or isinstance(at(3), str)  # pos_encoding_mode
    )
    if is_legacy != is_current:
        return legacy_order if is_legacy else current_order
    if not is_legacy and all(value is None for value in extra):
        return current_order
    raise unclear_order(extra, last, legacy_order, current_order)


class RunPositionals(NamedTuple):
    """What the positional arguments after the cache of a paged `run` mean."""

    k_scale: Any
    v_scale: Any
    return_lse: Any
    head_scales: tuple[Any, Any, Any] | None


def paged_run_positionals(args: tuple[Any, ...], k_scale: Any, v_scale: Any, return_lse: Any) -> RunPositionals:
    """Read three tensors of per-head numbers as fp8 scales, anything else as FlashInfer's older k_scale, v_scale,
    return_lse. ArgumentTypeError: an argument is given twice, or fits neither.
    """
    if _are_head_scales(args):
        return RunPositionals(k_scale, v_scale, return_lse, (args[0], args[1], args[2]))
    names = ("k_scale", "v_scale", "return_lse")
    named = dict(zip(names, args, strict=False))
    by_keyword = {"k_scale": k_scale is not None, "v_scale": v_scale is not None, "return_lse": return_lse is not False}
    twice = [name for name in named if by_keyword[name]]
    if twice:
        raise ArgumentTypeError(f"{twice[0]} was given twice: by position and by keyword")
    if len(args) > len(names) or isinstance(args[0], bool):
        _refuse(args, "k_scale, v_scale and return_lse, or fp8 scale_q, scale_k, scale_v with one number per head")
    return RunPositionals(named["k_scale"], named.get("v_scale", v_scale), named.get("return_lse", return_lse), None)


def ragged_run_positionals(args: tuple[Any, ...], return_lse: Any) -> tuple[Any, tuple[Any, Any, Any] | None]:
    """Return (return_lse, per-head scales): three tensors of per-head numbers are fp8 scales, a single bool is
    FlashInfer's older return_lse. ArgumentTypeError: an argument is given twice, or fits neither.
    """
    if _are_head_scales(args):
        return return_lse, (args[0], args[1], args[2])
    if len(args) != 1 or type(args[0]) is not bool:
        _refuse(args, "return_lse, or fp8 scale_q, scale_k, scale_v with one number per head")
    if return_lse is not False:
        raise ArgumentTypeError("return_lse was given twice: by position and by keyword")
    return args[0], None


def head_scale_positionals(args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return the per-head fp8 scales that `args` must be; anything else is an ArgumentTypeError."""
    if not _are_head_scales(args):
        _refuse(args, "fp8 scale_q, scale_k, scale_v with one number per head; pass all other arguments by keyword")
    return args[0], args[1], args[2]


def _are_head_scales(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in args)


def _refuse(args: tuple[Any, ...], accepted: str) -> None:
    got = ", ".join(map(describe, args))
    raise ArgumentTypeError(f"the positional arguments after k and v may be {accepted}; got {got}")
