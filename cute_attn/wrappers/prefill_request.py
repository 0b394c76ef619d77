"""The request of a prefill `plan` from its checked arguments: masks, multi-item scoring, promises about lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_attn.dispatch import select
from cute_attn.problem import DeviceTokens, Tokens
from cute_attn.request import batch_plan, checks, multi_item, positional
from cute_attn.request.batch_plan import Mask, RepeatedLengths
from cute_attn.request.multi_item import MultiItemScoring
from cute_attn.request.plan_arguments import PlanArguments
from cute_attn.wrappers.device_plan import HostOnly
from cute_attn.wrappers.plan_request import PlanRequest

if TYPE_CHECKING:
    from cute_attn.wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
    from cute_attn.wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper


def prefill_request(
    wrapper: BatchPrefillWithPagedKVCacheWrapper | BatchPrefillWithRaggedKVCacheWrapper,
    given: PlanArguments,
    tokens: Tokens | DeviceTokens,
    repeated: RepeatedLengths,
    host_only: HostOnly,
    items: MultiItemScoring,
) -> PlanRequest:
    """Check what tensors besides the index arrays say, and return the request."""
    batch_plan.check_repeated_lengths(tokens, repeated)
    if wrapper._sink_variant is not None:
        wrapper._sink_variant.check_plan(given.options)
    custom_mask, packed_custom_mask, _, uniform_q_len = host_only
    mask = batch_plan.NO_MASK
    if not custom_mask is packed_custom_mask is None:
        positional.check_packed_mask(packed_custom_mask)
        mask = batch_plan.mask(custom_mask, packed_custom_mask, tokens, wrapper.device)
    tokens = multi_item.bound_keys(items, tokens, mask)
    graphs = wrapper._use_cuda_graph
    if uniform_q_len is not None:
        uniform_q_len = checks.integer("uniform_q_len", uniform_q_len)
    equal = batch_plan.uniform_q_len(uniform_q_len, tokens) if graphs else _equal_qo(tokens)
    newest = equal is not None and wrapper.kv_source == "paged" and _are_newest(given, tokens, mask, equal)
    uniform = equal if graphs or newest else None
    return PlanRequest(given.options, tokens, mask, given.splits, given.page_size, uniform, newest)


def _equal_qo(tokens: Tokens | DeviceTokens) -> int | None:
    """Return the query tokens of every request, if all have as many, the host knows it, and they may be newest."""
    if isinstance(tokens, DeviceTokens) or (lengths := tokens.lengths).longest_qo > select.MOST_NEWEST:
        return None
    return lengths.equal_qo


def _are_newest(given: PlanArguments, tokens: Tokens | DeviceTokens, mask: Mask, q_len: int) -> bool:
    """Tell whether a decode plan could describe the batch. Not where results must not depend on other requests."""
    options, splits = given.options, given.splits
    num_qo_heads, num_kv_heads, causal = options.num_qo_heads, options.num_kv_heads, options.causal
    if not (type(num_qo_heads) is type(num_kv_heads) is int and type(causal) is bool):
        return False  # refused by name, later
    if not select.are_newest(q_len, (num_qo_heads, num_kv_heads), causal):
        return False
    if mask.packed is not None or tokens.multi_item:
        return False
    return splits.fixed_split_size is None and not splits.disable_split_kv
