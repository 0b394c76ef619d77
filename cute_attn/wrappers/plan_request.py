"""From the arguments of a `plan` to a `PlanRequest`: where its lengths are, masks, multi-item scoring, promises.

Lengths of index arrays on the GPU stay there: no call of `plan` waits for it. Plans that need them on the host read
them, with a synchronisation: custom masks, multi-item scoring, `uniform_q_len`, CUTE_ATTN_VALIDATE=1, the reference,
more page numbers than the buffer of CUDA graphs holds, and `fixed_split_size` where some batch within the bounds would
not fit the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from cute_attn.dispatch import select
from cute_attn.problem import Lengths
from cute_attn.request import batch_plan, checks, multi_item, positional
from cute_attn.request.batch_plan import PlanOptions, PlanRequest
from cute_attn.request.index_arrays import IndexArrays
from cute_attn.request.sink_variant import SinkVariant
from cute_attn.runtime import switches
from cute_attn.wrappers.graph import GraphBuffers

# Arguments of a prefill `plan`, by name.
OPTIONS = itemgetter(
    *("use_fp16_qk_reduction", "non_blocking", "fixed_split_size", "disable_split_kv"), *PlanOptions._fields
)
HOST_ONLY = itemgetter("custom_mask", "packed_custom_mask", "prefix_len_ptr", "uniform_q_len")  # need lengths there
REPEATED = itemgetter("seq_lens", "seq_lens_q", "max_token_per_sequence", "max_sequence_kv")  # say lengths again
ITEMS = itemgetter("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr")


class Place(NamedTuple):
    """What all plans of a wrapper have in common."""

    workspace: torch.Tensor  # as bytes
    kv_layout: str
    kv_source: str  # ragged | paged
    backend: str  # as the user named it
    graph: GraphBuffers | None = None  # with CUDA graphs
    key_ranges: bool = False  # whether runs bring a range of keys per token

    @property
    def device(self) -> torch.device:
        return self.workspace.device


# ---- lengths


def _is_on(device: torch.device, value: Any) -> bool:
    """Tell whether a tensor is on the GPU of a wrapper."""
    return isinstance(value, torch.Tensor) and value.is_cuda and value.device == device


def lengths_of(place: Place, arrays: IndexArrays, host_only: Sequence[Any] = ()) -> Lengths:
    """Check the index arrays of a batch, where they are if the plan leaves them there."""
    return arrays.on_device(place.device) if _stays_on_device(place, arrays, host_only) else arrays.on_host()


def _stays_on_device(place: Place, arrays: IndexArrays, host_only: Sequence[Any]) -> bool:
    """Tell whether a plan leaves its lengths on the device: an array of them is there and no other GPU has one, and
    nothing needs them on the host. Page numbers in use must fit their buffer of CUDA graphs.
    """
    _, qo_indptr, kv_indptr, indices, last_page_len, *_ = arrays
    device = place.device
    if not (_is_on(device, qo_indptr) or _is_on(device, kv_indptr) or _is_on(device, last_page_len)):
        return False
    lengths = [x for x in (qo_indptr, kv_indptr, last_page_len) if x is not None]
    if place.backend == "reference":
        return False
    if not all(isinstance(x, torch.Tensor) and (x.is_cpu or _is_on(device, x)) for x in lengths):
        return False
    if any(value is not None for value in host_only) or switches.validates():
        return False
    if place.graph is None or not isinstance(indices, torch.Tensor):
        return True
    return indices.numel() <= place.graph.page_indices.numel()


# ---- prefill


def prefill_request(
    place: Place, arguments: Mapping[str, Any], names: Sequence[str], sinks: SinkVariant | None = None
) -> PlanRequest:
    """Check the arguments of a prefill `plan`, by name, and return the request. `names`: the index arrays. `sinks`: the
    wrapper's variant.
    """
    given = batch_plan.prefill_arguments(arguments.get("page_size", 1), *OPTIONS(arguments))
    host_only, index = HOST_ONLY(arguments), [arguments[name] for name in names]
    if place.kv_source == "paged":
        index.append(given.page_size)
    lengths = lengths_of(place, IndexArrays(names, *index), host_only)
    lengths = batch_plan.repeated_lengths(lengths, *REPEATED(arguments))
    if sinks is not None:
        sinks.check_plan(given.options)
    custom_mask, packed_custom_mask, _, uniform_q_len = host_only
    mask = batch_plan.NO_MASK
    if not custom_mask is packed_custom_mask is None:
        positional.check_packed_mask(packed_custom_mask)
        mask = batch_plan.mask(custom_mask, packed_custom_mask, lengths, place.device)
    lengths = multi_item.bound_keys(ITEMS(arguments), lengths, mask)
    if uniform_q_len is not None:
        uniform_q_len = checks.integer("uniform_q_len", uniform_q_len)
    request = PlanRequest(*given[:3], lengths=lengths, mask=mask)
    if place.graph is None:
        return with_newest(place, request, lengths.longest_qo)
    promised = batch_plan.uniform_q_len(uniform_q_len, lengths)
    return with_newest(place, request, promised)._replace(max_qo_len=promised)


def with_newest(place: Place, request: PlanRequest, most: int | None) -> PlanRequest:
    """Return the request as one of the newest tokens where kernels of decode run it. `most`: query tokens of any
    request, where known.
    """
    options, bound = request.options, 0
    heads, causal = (options.num_qo_heads, options.num_kv_heads), options.causal
    band = request.lengths.key_bounds is None and request.mask.packed is None and not place.key_ranges
    checked = type(heads[0]) is type(heads[1]) is int and type(causal) is bool  # others are refused by name, later
    if most and place.kv_source == "paged" and band and checked and not any(request.splits):  # splits of their own
        bound = select.newest_bound(most, heads, causal, place.backend)
    return request._replace(max_qo_len=bound, newest=True) if bound else request
