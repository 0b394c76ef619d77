"""The request of a prefill `plan` from its checked arguments: masks, multi-item scoring, promises about lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    uniform = batch_plan.uniform_q_len(uniform_q_len, tokens) if wrapper._use_cuda_graph else None
    return PlanRequest(given.options, tokens, mask, given.splits, given.page_size, uniform)
