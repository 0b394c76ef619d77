"""The arguments of `plan` besides tensors, checked once: the steps of an engine differ in lengths only."""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_attn.errors import NotSupported, Refusal
from cute_attn.request import batch_plan, checks, positional
from cute_attn.request.batch_plan import PlanOptions, Splits
from cute_attn.request.once import once


class PlanArguments(NamedTuple):
    """Checked arguments. Equal ones of equal types are one object."""

    options: PlanOptions
    splits: Splits
    page_size: int
    q_len: int = 0  # query tokens of every request, of decode plans


@once()
def prefill(
    page_size: Any,
    use_fp16_qk_reduction: Any,
    non_blocking: Any,
    fixed_split_size: Any,
    disable_split_kv: Any,
    *options: Any,
) -> PlanArguments:
    """Check the arguments of a prefill plan; `options`: fields of PlanOptions."""
    given = PlanOptions(*options)
    positional.check_plan(given.head_dim_vo, given.causal)
    checks.boolean("use_fp16_qk_reduction", use_fp16_qk_reduction)
    checks.boolean("non_blocking", non_blocking)
    size = batch_plan.page_size(page_size)
    return PlanArguments(given, batch_plan.splits(fixed_split_size, disable_split_kv, size), size)


@once()
def decode(
    page_size: Any,
    non_blocking: Any,
    window_right: Any,
    q_len_per_req: Any,
    is_causal: Any,
    fixed_split_size: Any,
    disable_split_kv: Any,
    data_type: Any,
    *options: Any,
) -> PlanArguments:
    """Check the arguments of a decode plan; `options`: fields of PlanOptions, of which `causal` follows from
    `q_len_per_req`.
    """
    checks.boolean("non_blocking", non_blocking)
    if checks.integer("window_right", window_right) != 0:
        reason = "a token sees no key to its right"
        batch_plan.refuse("window_right", window_right, reason, "a prefill wrapper with causal=False")
    q_len = batch_plan.count("q_len_per_req", q_len_per_req)
    if is_causal is not None and checks.boolean("is_causal", is_causal) != (q_len > 1):
        feature, reason = f"is_causal={is_causal} with q_len_per_req={q_len}", "tokens see the keys up to their own"
        raise NotSupported([Refusal("every backend", feature, reason, "a prefill wrapper")])
    size, given = batch_plan.page_size(page_size), PlanOptions(*options)
    q_dtype = data_type if given.q_data_type is None else given.q_data_type
    planned = given._replace(
        q_data_type="float16" if q_dtype is None else q_dtype,
        kv_data_type=data_type if given.kv_data_type is None else given.kv_data_type,
        causal=q_len > 1,
    )
    return PlanArguments(planned, batch_plan.splits(fixed_split_size, disable_split_kv, size), size, q_len)
