"""Both generations of the batch wrappers' calls, as `spellings` has it for single requests.

FlashInfer inserted `head_dim_vo` and `o_data_type` between the arguments of `plan`, and made the scales of `run`
keywords; the types of positional arguments tell which order a call follows.
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
from cute_attn.wrappers.legacy_args import is_tensor, name_in_order, rename

P = ParamSpec("P")
R = TypeVar("R")

RENAMED = {
    "allow_fp16_qk_reduction": "use_fp16_qk_reduction",
    "head_dim": "head_dim_qk",
    "qk_indptr_buf": "mask_indptr_buf",
}
_MASKS = ("custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode", "use_fp16_qk_reduction")
PAGED_SEED = (
    *_MASKS,
    *("sm_scale", "window_left", "logits_soft_cap"),
    *("rope_scale", "rope_theta", "q_data_type", "kv_data_type", "non_blocking"),
)
RAGGED_SEED = (
    *_MASKS,
    *("window_left", "logits_soft_cap", "sm_scale"),
    *("rope_scale", "rope_theta", "q_data_type", "kv_data_type"),
)


def renaming(function: Callable[P, R]) -> Callable[P, R]:
    """Let `function`, declared with today's names, take the seed's too."""
    names = inspect.signature(function).parameters
    renamed = [(old, new) for old, new in RENAMED.items() if new in names]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        for old, new in renamed:
            if old in kwargs:
                rename(kwargs, old, new)
        return function(*args, **kwargs)

    return wrapper


def both_plan_spellings(common: int, seed: tuple[str, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a `plan`, declared in today's order, take the arguments after the `common` ones in the seed's order too."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        today = tuple(positional[1 + common :])
        last = positional[common]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            extra = args[1 + common :]
            if extra:
                order = plan_order(extra, seed, today, last)
                kwargs = name_in_order(order, extra, kwargs, last)
            return function(*args[: 1 + common], **kwargs)

        return renaming(wrapper)

    return decorate


def plan_order(extra: tuple[Any, ...], seed: tuple[str, ...], today: tuple[str, ...], last: str) -> tuple[str, ...]:
    """The order that positional arguments after `last` follow: today's has head_dim_vo in front."""
    at = dict(enumerate(extra)).get
    is_today = isinstance(at(0), numbers.Integral) or type(at(3)) is bool or isinstance(at(4), str)
    is_today = is_today or is_tensor(at(1), torch.bool) or isinstance(at(2), torch.Tensor)
    is_seed = isinstance(at(0), torch.Tensor) or type(at(2)) is bool or isinstance(at(3), str)
    is_seed = is_seed or is_tensor(at(1), torch.uint8)
    if is_seed != is_today:
        return seed if is_seed else today
    if not is_seed and all(value is None for value in extra):
        return today
    index, value = next((i, value) for i, value in enumerate(extra) if value is not None)
    raise ArgumentTypeError(
        f"positional argument {index + 1} after {last} is {seed[min(index, len(seed) - 1)]} in the seed order "
        f"({last}, {', '.join(seed[:3])}, ...) and {today[min(index, len(today) - 1)]} in today's order "
        f"({last}, {', '.join(today[:4])}, ...), and the arguments do not tell which is meant; "
        f"got {describe(value)}: pass it by keyword"
    )


class Extras(NamedTuple):
    """What positional arguments after the tensors of a `run` may say."""

    k_scale: Any
    v_scale: Any
    return_lse: Any
    head_scales: tuple[Any, Any, Any] | None


def paged_extras(args: tuple[Any, ...], k_scale: Any, v_scale: Any, return_lse: Any) -> Extras:
    """Three tensors of one number a head are fp8 scales; else the seed's k_scale, v_scale, return_lse."""
    if _are_head_scales(args):
        return Extras(k_scale, v_scale, return_lse, (args[0], args[1], args[2]))
    names = ("k_scale", "v_scale", "return_lse")
    named = dict(zip(names, args, strict=False))
    given = {"k_scale": k_scale is not None, "v_scale": v_scale is not None, "return_lse": return_lse is not False}
    twice = [name for name in named if given[name]]
    if twice:
        raise ArgumentTypeError(f"{twice[0]} was given twice: by position and by keyword")
    if len(args) > len(names) or isinstance(args[0], bool):
        _refuse(args, "k_scale, v_scale and return_lse, or fp8 scale_q, scale_k, scale_v with a number a head")
    return Extras(named["k_scale"], named.get("v_scale", v_scale), named.get("return_lse", return_lse), None)


def ragged_extras(args: tuple[Any, ...], return_lse: Any) -> tuple[Any, tuple[Any, Any, Any] | None]:
    """Three tensors of one number a head are fp8 scales; else the seed's return_lse. Both in this order."""
    if _are_head_scales(args):
        return return_lse, (args[0], args[1], args[2])
    if len(args) != 1 or type(args[0]) is not bool:
        _refuse(args, "return_lse, or fp8 scale_q, scale_k, scale_v with a number a head")
    if return_lse is not False:
        raise ArgumentTypeError("return_lse was given twice: by position and by keyword")
    return args[0], None


def head_scales_only(args: tuple[Any, ...]) -> tuple[Any, Any, Any] | None:
    if not args:
        return None
    if not _are_head_scales(args):
        _refuse(args, "fp8 scale_q, scale_k, scale_v with a number a head; pass all else by keyword")
    return args[0], args[1], args[2]


def _are_head_scales(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in args)


def _refuse(args: tuple[Any, ...], accepted: str) -> None:
    given = ", ".join(map(describe, args))
    raise ArgumentTypeError(f"the positional arguments after k and v may be {accepted}; got {given}")
