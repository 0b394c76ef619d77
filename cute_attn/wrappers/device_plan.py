"""Plans whose lengths stay on the device: no call of `plan` waits for it.

The planner kernel makes the schedule; the host knows bounds. Of a prefill batch that is the number of rows of q, which
the first run tells: it launches the planner, on copies of the index arrays that `plan` made. A decode plan, and one of
a wrapper with CUDA graphs whose bounds are settled, launches it at once, so that a captured plan schedules again
whatever the index arrays hold in a replay.

Plans that need lengths on the host read them there, with a synchronisation: custom masks, multi-item scoring,
`uniform_q_len`, CUTE_ATTN_VALIDATE=1, the reference, more page numbers than the buffer of
CUDA graphs holds, and `fixed_split_size` where some batch within the bounds would not fit the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cute_attn.dispatch import backends, capabilities, select
from cute_attn.errors import RuntimeArgumentError
from cute_attn.kernels.host.device_batch import NO_LENGTHS
from cute_attn.problem import BatchLengths, BatchLimits, DeviceLengths, DeviceTokens, GraphLimits, Settings, Tokens
from cute_attn.request import batch_plan, checks, device_lengths, few_requests
from cute_attn.request.batch_plan import Pages
from cute_attn.request.batch_run import RunArguments
from cute_attn.runtime import switches
from cute_attn.runtime.staging import Staging, is_capturing
from cute_attn.wrappers.plan_request import Copy, HostCopy, PlanRequest, same_memory

if TYPE_CHECKING:
    from cute_attn.wrappers.base import BatchWrapper
    from cute_attn.wrappers.variants import Variant


# Arguments of a prefill `plan` that need lengths on the host, if any is given: custom_mask, packed_custom_mask,
# prefix_len_ptr and uniform_q_len.
HostOnly = tuple[Any, Any, Any, Any]


def _is_on(device: torch.device, value: Any) -> bool:
    """Tell whether a tensor is on the GPU of a wrapper."""
    return isinstance(value, torch.Tensor) and value.is_cuda and value.device == device


def stays_on_device(wrapper: BatchWrapper, arrays: tuple[Any, ...], host_only: HostOnly | None = None) -> bool:
    """Tell whether a plan leaves its lengths on the device: an array of `arrays` is there and no other GPU has one, and
    nothing needs them on the host.
    """
    if not any(_is_on(wrapper.device, array) for array in arrays) or wrapper._backend == "reference":
        return False
    if not all(isinstance(x, torch.Tensor) and (x.is_cpu or _is_on(wrapper.device, x)) for x in arrays):
        return False
    if host_only is not None and any(value is not None for value in host_only):
        return False
    return not switches.validates()


def _fits_buffer(wrapper: BatchWrapper, pages: Pages) -> bool:
    """Tell whether all page numbers fit the buffer of CUDA graphs; else lengths tell whether those in use do."""
    indices = pages.indices
    if not wrapper._use_cuda_graph or not isinstance(indices, torch.Tensor):
        return True
    return indices.numel() <= wrapper._indices_buffer().numel()


def paged_tokens(
    wrapper: BatchWrapper,
    arrays: tuple[Any, Any, Any],
    indices: Any,
    page_size: int,
    names: tuple[str, str, str, str],
    host_only: HostOnly,
) -> Tokens | DeviceTokens:
    """Check the index arrays of a paged prefill batch, where they are if the plan leaves them there. `arrays`: indptr
    of query tokens, indptr of pages and last_page_len.
    """
    tokens = few_requests.paged(*arrays, indices, page_size)
    if tokens is not None:
        batch_plan.check_indices(names, indices, tokens.kv_bounds[0], tokens.kv_bounds[-1])
        return tokens
    qo_indptr, pages = arrays[0], Pages(arrays[1], indices, arrays[2])
    if stays_on_device(wrapper, arrays, host_only) and _fits_buffer(wrapper, pages):
        return device_lengths.paged(wrapper.device, (qo_indptr, 0), pages, page_size, names)
    return batch_plan.paged(batch_plan.indptr(names[0], qo_indptr), pages, page_size, names)


def ragged_tokens(wrapper: BatchWrapper, qo_indptr: Any, kv_indptr: Any, host_only: HostOnly) -> Tokens | DeviceTokens:
    """Check the index arrays of a ragged batch, where they are if the plan leaves them there."""
    tokens = few_requests.ragged(qo_indptr, kv_indptr)
    if tokens is not None:
        return tokens
    if stays_on_device(wrapper, (qo_indptr, kv_indptr), host_only):
        return device_lengths.ragged(wrapper.device, qo_indptr, kv_indptr)
    return batch_plan.ragged(qo_indptr, kv_indptr)


def decode_tokens(
    wrapper: BatchWrapper, q_len: int, pages: Pages, page_size: int, names: tuple[str, str, str, str]
) -> Tokens | DeviceTokens:
    """Check the index arrays of a decode batch, where they are if the plan leaves them there."""
    tokens = few_requests.decode(pages.indptr, pages.last_page_len, pages.indices, page_size, q_len)
    if tokens is not None:
        batch_plan.check_indices(names, pages.indices, tokens.kv_bounds[0], tokens.kv_bounds[-1])
        return tokens
    if stays_on_device(wrapper, (pages.indptr, pages.last_page_len)) and _fits_buffer(wrapper, pages):
        return device_lengths.paged(wrapper.device, (None, q_len), pages, page_size, names)
    batch_size = max(0, checks.tensor(names[1], pages.indptr).numel() - 1)
    return batch_plan.paged(batch_plan.uniform_queries(batch_size, q_len), pages, page_size, names, q_len)


# ---- plan


def lengths_of(tokens: Tokens | DeviceTokens) -> BatchLengths | DeviceLengths:
    """Return the lengths where they are."""
    return tokens.device if isinstance(tokens, DeviceTokens) else tokens.lengths


def choice_lengths(tokens: Tokens | DeviceTokens) -> BatchLengths:
    """Return the lengths by which tiles and backends are chosen; of a plan with device lengths its limits decide."""
    return NO_LENGTHS if isinstance(tokens, DeviceTokens) else tokens.lengths


def limits_of(request: PlanRequest, graph: GraphLimits | None) -> GraphLimits | None:
    """Return the sizes that launches of a plan have room for; None if they follow from lengths on the host."""
    tokens = request.tokens
    if graph is not None or not isinstance(tokens, DeviceTokens):
        return graph
    assert tokens.rows is not None
    keys = tokens.kv_end * (request.page_size if tokens.kv_indices is not None else 1)
    return GraphLimits(tokens.batch_size, tokens.rows, keys, request.q_len)


def launch(
    wrapper: BatchWrapper,
    tokens: Tokens | DeviceTokens,
    settings: Settings,
    backend: capabilities.Backend,
    limits: BatchLimits,
    variant: Variant,
) -> Any:
    """Return what runs the batch, with its schedule uploaded, or lengths read on the device. None if the plan needs
    them on the host.
    """
    if isinstance(tokens, Tokens):
        return backends.plan(backend, settings, tokens.lengths, limits, variant.staging)
    tokens.check_unchanged()
    planned = backends.plan_on_device(backend, settings, tokens.device, limits, variant.staging)
    if planned is None and is_capturing(wrapper.device):
        raise RuntimeArgumentError(
            f"a plan of the {backend.name} backend with these options reads the index arrays, which the capture of a "
            "CUDA graph cannot: call plan() before the capture"
        )
    return planned


def on_host(request: PlanRequest) -> PlanRequest:
    """Return the request with its lengths on the host."""
    tokens = request.tokens
    return request._replace(tokens=tokens.host) if isinstance(tokens, DeviceTokens) else request


def placed(wrapper: BatchWrapper, request: PlanRequest) -> tuple[PlanRequest, list[Copy | HostCopy]]:
    """Return the request with index arrays where launches read them, and the copies into the buffers of CUDA graphs."""
    tokens = request.tokens
    assert isinstance(tokens, DeviceTokens)
    if not wrapper._use_cuda_graph:
        if tokens.kv_indices is not None:
            tokens = tokens._replace(kv_indices=wrapper._indices_on_device(tokens.kv_indices))
        return request._replace(tokens=tokens), []
    copies: list[Copy | HostCopy] = []
    for name, buffer in wrapper._index_buffers.items():
        if "indices" in name:
            continue
        source = _source(name, tokens.device)
        if source is not None and not same_memory(source, buffer):
            copies.append(Copy(buffer, wrapper._aside(source), True))
    if tokens.kv_indices is not None:
        buffer = wrapper._indices_buffer()
        used = len(tokens.kv_indices)
        if not same_memory(tokens.kv_indices, buffer):
            copies.append(Copy(buffer[:used], wrapper._aside(tokens.kv_indices), True))
        tokens = tokens._replace(kv_indices=buffer, device=tokens.device._replace(max_kv=used))
    return request._replace(tokens=tokens), copies


def _source(name: str, lengths: DeviceLengths) -> torch.Tensor | None:
    if "last_page_len" in name:
        return lengths.last_page_len
    return lengths.qo_indptr if name.startswith("qo") else lengths.kv_indptr


def captured(wrapper: BatchWrapper, request: PlanRequest) -> PlanRequest:
    """Return the request of a planner launch. In a capture its replays read the wrapper's index buffers, which hold the
    lengths of the latest plan.
    """
    tokens, buffers = request.tokens, wrapper._index_buffers
    if not isinstance(tokens, DeviceTokens) or not wrapper._use_cuda_graph or not is_capturing(wrapper.device):
        return request
    queries = [buffer for name, buffer in buffers.items() if name.startswith("qo")]
    (keys,) = (buffer for name, buffer in buffers.items() if "kv_indptr" in name)
    last = [buffer for name, buffer in buffers.items() if "last_page_len" in name]
    device = tokens.device._replace(
        qo_indptr=queries[0] if queries else None, kv_indptr=keys, last_page_len=last[0] if last else None
    )
    return request._replace(tokens=tokens._replace(device=device))


def is_open(request: PlanRequest | None) -> bool:
    """Tell whether a plan waits for its first run to tell the number of rows."""
    return request is not None and isinstance(request.tokens, DeviceTokens) and request.tokens.rows is None


def bounded(wrapper: BatchWrapper, request: PlanRequest) -> PlanRequest:
    """Return the request with the bounds of a wrapper's captured launches, if they are settled."""
    invariants, tokens = wrapper._graph_invariants, request.tokens
    if invariants is None or not isinstance(tokens, DeviceTokens) or tokens.rows is not None:
        return request
    return request._replace(tokens=_with_bounds(tokens, invariants.graph.max_rows, invariants.graph.max_kv_tokens))


def leave_open(wrapper: BatchWrapper, request: PlanRequest) -> PlanRequest:
    """Return the request with copies of its index arrays, which the caller may overwrite before the first run. Raises
    what no run could do.
    """
    tokens = request.tokens
    assert isinstance(tokens, DeviceTokens)
    if is_capturing(wrapper.device):
        raise RuntimeArgumentError(
            "plan() must come before the capture of a CUDA graph, and a run, which tells the number of rows"
        )
    settings = wrapper._settings(request)
    select.chosen(settings.features, wrapper._backend, select.load_class(settings.features, 1, False))
    qo_indptr, kv_indptr, last = tokens.device[:3]
    device = tokens.device._replace(
        qo_indptr=None if qo_indptr is None else qo_indptr.clone(),
        kv_indptr=kv_indptr.clone(),
        last_page_len=None if last is None else last.clone(),
    )
    return request._replace(tokens=tokens._replace(device=device))


def close(wrapper: BatchWrapper, arguments: RunArguments | None) -> None:
    """Settle what a plan left to its first run; without one its lengths are read."""
    with wrapper._lock:
        if is_open(wrapper._request):
            assert wrapper._request is not None
            request = _closed(wrapper._request, arguments, wrapper._kv_layout)
            _, wrapper._graph_invariants = wrapper._checked(request)
            wrapper._request = request


def first_run(wrapper: BatchWrapper, arguments: RunArguments, run: Callable[..., Any], *options: Any) -> Any:
    """Settle an open plan by a run, and run. A run that fails settles nothing."""
    with wrapper._lock:
        wrapper._follow_copies()
        request, invariants = wrapper._request, wrapper._graph_invariants
        try:
            close(wrapper, arguments)
            return run(arguments, *options)
        except Exception:
            if is_open(request):  # and no other thread was first
                wrapper._request, wrapper._graph_invariants, wrapper._plan = request, invariants, None
                for variant in wrapper._variants.by_settings.values():
                    variant.plan = variant.backend = None
                    variant.staging = Staging(wrapper.device)  # with CUDA graphs the first schedule settles its size
            raise


def _closed(request: PlanRequest, arguments: RunArguments | None, kv_layout: str) -> PlanRequest:
    """Return an open request with the bounds that the tensors of its first run tell."""
    tokens = request.tokens
    assert isinstance(tokens, DeviceTokens)
    if arguments is None:
        return request._replace(tokens=_with_bounds(tokens, tokens.host.rows, tokens.host.kv_end))
    q, keys = checks.tensor("q", arguments.q), 0
    if tokens.kv_indices is None:
        k = checks.tensor("k", arguments.kv_cache[0])
        keys = k.shape[1 if kv_layout == "HND" else 0] if k.dim() == 3 else 0
    return request._replace(tokens=_with_bounds(tokens, q.shape[0] if q.dim() else 0, keys))


def _with_bounds(tokens: DeviceTokens, rows: int, keys: int) -> DeviceTokens:
    """Return tokens with bounds. `keys`: rows of ragged k and v."""
    device = tokens.device if tokens.kv_indices is not None else tokens.device._replace(max_kv=keys)
    return tokens._replace(rows=rows, device=device)
