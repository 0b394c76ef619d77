"""Arguments by position: FlashInfer has inserted new ones between others, so that its releases differ in their order.

Calls follow the current order. Those of an older one put a mask or a flag where no such thing can be, and are refused
by an error that shows both orders.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_attn.errors import ArgumentTypeError
from cute_attn.request.checks import describe

SINGLE_PREFILL = (
    "scale_q, scale_k, scale_v, o_dtype, custom_mask, packed_custom_mask, causal, ... follow v",
    "custom_mask, packed_custom_mask, causal, kv_layout, ...",
)
PREFILL_PLAN = (
    "head_dim_vo, custom_mask, packed_custom_mask, causal, ... follow page_size, or head_dim_qk of the ragged wrapper",
    "custom_mask, packed_custom_mask, causal, pos_encoding_mode, ...",
)


def check_scales(*scales: Any) -> None:
    """Refuse masks and `causal` of the older order in the place of scale_q, scale_k and scale_v."""
    for name, value in zip(("scale_q", "scale_k", "scale_v"), scales, strict=True):
        if type(value) is bool or (isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)):
            raise _other_order(f"{name} must be a floating-point tensor", SINGLE_PREFILL, value)


def check_plan(head_dim_vo: Any, causal: Any) -> None:
    """Refuse a mask of the older order in the place of head_dim_vo, and pos_encoding_mode in that of causal."""
    if isinstance(head_dim_vo, torch.Tensor):
        raise _other_order("head_dim_vo must be an int", PREFILL_PLAN, head_dim_vo)
    if isinstance(causal, str):
        raise _other_order("causal must be True or False", PREFILL_PLAN, causal)


def check_packed_mask(value: Any) -> None:
    """Refuse `causal` of the older order in the place of packed_custom_mask."""
    if type(value) is bool:
        raise _other_order("packed_custom_mask must be a torch.Tensor", PREFILL_PLAN, value)


def check_head_scales(args: tuple[Any, ...], older: str) -> None:
    """Check that the positional arguments `args` of a run are per-head fp8 scales.

    `older`: what followed the keys and values of such a run in FlashInfer's older releases.
    """
    if len(args) == 3 and all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in args):
        return
    expected = "the positional arguments after keys and values must be scale_q, scale_k, scale_v of fp8 attention"
    got = ", ".join(map(describe, args))
    raise ArgumentTypeError(
        f"{expected}, one number per head (in FlashInfer's older releases {older}): pass all other arguments by "
        f"keyword; got {got}"
    )


def _other_order(expected: str, orders: tuple[str, str], value: Any) -> ArgumentTypeError:
    current, older = orders
    return ArgumentTypeError(
        f"{expected}, got {describe(value)}. By position, {current}; in FlashInfer's older releases {older}: "
        "pass these arguments by keyword"
    )
