"""The checked arguments of `plan`. Those besides tensors are checked once: the steps of an engine differ in lengths."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from cute_attn.problem import Lengths
from cute_attn.request import batch_plan, checks, positional
from cute_attn.request.batch_plan import Mask, PlanOptions, Splits
from cute_attn.request.block_sparse import Matrix
from cute_attn.request.once import once


class PlanRequest(NamedTuple):
    """What a `plan` asks for."""

    options: PlanOptions
    lengths: Lengths
    mask: Mask
    splits: Splits
    page_size: int
    max_qo_len: int | None = None  # most query tokens of a request, where launches may depend on it
    newest: bool = False  # whether all query tokens are the newest of their request, and see the keys up to their own
    matrix: Matrix | None = None  # of a block-sparse plan

    def with_options(self, overrides: dict[str, Any]) -> PlanRequest:
        """Return the request with some of its options replaced. Tokens that see later keys then are not `newest`."""
        newest = self.newest and (not self.options.causal or bool(overrides.get("causal", True)))
        return self._replace(options=self.options._replace(**overrides), newest=newest) if overrides else self

    def with_lengths(self, lengths: Lengths) -> PlanRequest:
        """Return the request with other lengths, without a bound that they do not keep."""
        longest, most = lengths.longest_qo, self.max_qo_len
        if longest is None or most is None or longest <= most:
            return self._replace(lengths=lengths)
        return self._replace(lengths=lengths, max_qo_len=None, newest=False)

    def differs(self, before: PlanRequest) -> bool:
        """Tell whether it differs from another in more than lengths. Types count: 1 == 1.0 == True."""
        old, new = before.lengths, self.lengths
        return (
            (before.options is not self.options and _options_differ(before.options, self.options))
            or (before.splits is not self.splits and before.splits != self.splits)
            or before[4:] != self[4:]  # page size, bound of query tokens, matrix
            or old.batch_size != new.batch_size
            or not (before.mask.packed is self.mask.packed is None)
            or not (old.key_bounds is new.key_bounds is None)
        )


def _options_differ(before: PlanOptions, now: PlanOptions) -> bool:
    return any(map(operator.is_not, map(type, before), map(type, now))) or before != now


class PlanArguments(NamedTuple):
    """Checked arguments besides tensors. Equal ones of equal types are one object."""

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
    size = batch_plan.count("page_size", page_size)
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
        reason, instead = "a token sees no key to its right", "a prefill wrapper with causal=False"
        checks.refuse_given(reason, instead, window_right=window_right)
    q_len = batch_plan.count("q_len_per_req", q_len_per_req)
    if is_causal is not None and checks.boolean("is_causal", is_causal) != (q_len > 1):
        feature, reason = f"is_causal={is_causal} with q_len_per_req={q_len}", "tokens see the keys up to their own"
        checks.refuse(feature, reason, "a prefill wrapper")
    size, given = batch_plan.count("page_size", page_size), PlanOptions(*options)
    q_dtype = data_type if given.q_data_type is None else given.q_data_type
    planned = given._replace(
        q_data_type="float16" if q_dtype is None else q_dtype,
        kv_data_type=data_type if given.kv_data_type is None else given.kv_data_type,
        causal=q_len > 1,
    )
    return PlanArguments(planned, batch_plan.splits(fixed_split_size, disable_split_kv, size), size, q_len)
