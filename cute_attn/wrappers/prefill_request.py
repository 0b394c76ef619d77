"""The request of a prefill `plan` from its checked arguments: masks, multi-item scoring, promises about lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_attn.dispatch import select
from cute_attn.problem import DeviceTokens, Tokens
from cute_attn.request import batch_plan, multi_item
from cute_attn.request.batch_plan import RepeatedLengths
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
    mask = batch_plan.mask(custom_mask, packed_custom_mask, tokens, wrapper.device)
    tokens = multi_item.bound_keys(items, tokens, mask)
    request = PlanRequest(given.options, tokens, mask, given.splits, given.page_size)
    graphs = wrapper._use_cuda_graph
    equal = batch_plan.uniform_q_len(uniform_q_len, tokens) if graphs else _equal_qo(tokens)
    newest = equal is not None and wrapper.kv_source == "paged" and _are_newest(request, equal)
    return request._replace(uniform_q_len=equal if graphs or newest else None, newest=newest)


def _equal_qo(tokens: Tokens | DeviceTokens) -> int | None:
    """Return the query tokens of every request, if all have as many and the host knows it."""
    return tokens.lengths.equal_qo if isinstance(tokens, Tokens) else None


def _are_newest(request: PlanRequest, q_len: int) -> bool:
    """Tell whether a decode plan could describe the batch. Not where results must not depend on other requests."""
    options, splits = request.options, request.splits
    if request.mask.packed is not None or request.tokens.multi_item:
        return False
    if splits.fixed_split_size is not None or splits.disable_split_kv:
        return False
    heads = options.num_qo_heads, options.num_kv_heads
    known = all(type(n) is int for n in heads) and type(options.causal) is bool  # others are refused by name, later
    return known and select.are_newest(q_len, heads, options.causal)
