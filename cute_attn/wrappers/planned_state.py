"""What serving engines read of a planned wrapper under FlashInfer's attribute names: options, sizes, index buffers.

All of it is read-only. Without CUDA graphs, an index buffer is a copy made when it is read; a run notices that the copy
was written, and schedules its lengths first as if they had been planned.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from cute_attn.errors import NotPlannedError, RuntimeArgumentError
from cute_attn.request import batch_plan
from cute_attn.request.index_arrays import int32
from cute_attn.runtime import capture
from cute_attn.runtime.staging import is_capturing

if TYPE_CHECKING:
    from cute_attn.problem import BatchPlan, DeviceTokens, Features, Settings, Tokens
    from cute_attn.wrappers.base import GraphInvariants
    from cute_attn.wrappers.plan_request import PlanRequest
    from cute_attn.wrappers.variants import Variant, Variants


class IndexCopy(NamedTuple):
    """A copy of planned lengths that a caller holds, and torch's count of changes when it was last read."""

    tensor: torch.Tensor
    version: int


class PlannedState:
    """Attributes of a wrapper that follow from its plan. Before one, hasattr() of the options is False."""

    device: torch.device
    _backend: str
    _use_cuda_graph: bool
    _workspace: torch.Tensor
    _index_buffers: dict[str, torch.Tensor]
    _mask_buffers: tuple[torch.Tensor, torch.Tensor] | None
    _lock: threading.RLock
    _request: PlanRequest | None
    _graph_invariants: GraphInvariants | None
    _variants: Variants
    _current: Variant
    _plan: BatchPlan | None
    _copies: dict[str, IndexCopy]

    if TYPE_CHECKING:  # of `BatchWrapper`

        def _settings(self, request: PlanRequest) -> Settings: ...

        def _planned(self) -> BatchPlan: ...

        def _make_plan(self, request: PlanRequest) -> None: ...

        def _variant(self, overrides: dict[str, Any]) -> Variant: ...

        def _indices_buffer(self) -> torch.Tensor: ...

    # ---- options, as `plan` or the latest `forward` got them

    def _in_force(self) -> PlanRequest:
        if self._request is None:
            raise NotPlannedError(f"{type(self).__name__} has no plan yet")
        request = self._request
        return request._replace(options=request.options._replace(**self._current.overrides))

    @property
    def _sm_scale(self) -> Any:
        return self._in_force().options.sm_scale

    @property
    def _window_left(self) -> Any:
        return self._in_force().options.window_left

    @property
    def _logits_soft_cap(self) -> Any:
        cap = self._in_force().options.logits_soft_cap
        return 0.0 if cap is None else cap

    @property
    def _causal(self) -> Any:
        return self._in_force().options.causal

    @property
    def _pos_encoding_mode(self) -> Any:
        return self._in_force().options.pos_encoding_mode

    @property
    def _rope_scale(self) -> Any:
        return self._in_force().options.rope_scale

    @property
    def _rope_theta(self) -> Any:
        return self._in_force().options.rope_theta

    @property
    def _num_qo_heads(self) -> Any:
        return self._in_force().options.num_qo_heads

    @property
    def _num_kv_heads(self) -> Any:
        return self._in_force().options.num_kv_heads

    @property
    def _page_size(self) -> int:
        return self._in_force().page_size

    @property
    def _q_len_per_req(self) -> int | None:
        return self._in_force().tokens.q_len

    @property
    def _cached_q_data_type(self) -> torch.dtype:
        return self._features().q_dtype

    @property
    def _cached_kv_data_type(self) -> torch.dtype:
        return self._features().kv_dtype

    @property
    def _cached_o_data_type(self) -> torch.dtype:
        return self._features().o_dtype

    def _features(self) -> Features:
        return self._settings(self._in_force()).features

    @property
    def resolved_backend(self) -> str:
        """Name of the backend that the plan chose; the constructor's `backend` before a plan."""
        return self._backend if self._request is None else (self._plan or self._planned()).backend

    # ---- sizes and memory

    @property
    def _plan_info(self) -> BatchPlan | None:
        """The plan in force; None before the first."""
        return None if self._request is None else self._plan or self._planned()

    @property
    def _batch_size(self) -> int:
        return self._in_force().tokens.batch_size

    @property
    def _qo_indptr_last(self) -> int:
        return int(self._in_force().tokens.lengths.qo_indptr[-1])

    @property
    def _max_q_len(self) -> int:
        return int(np.diff(self._in_force().tokens.lengths.qo_indptr).max(initial=0))

    @property
    def _max_kv_len(self) -> int:
        return int(self._in_force().tokens.lengths.kv_len.max(initial=0))

    @property
    def _max_total_num_rows(self) -> int | None:
        """The most query tokens of a captured launch; None without CUDA graphs and before the first plan."""
        return None if self._graph_invariants is None else self._graph_invariants.graph.max_rows

    @property
    def _workspace_size(self) -> int:
        return self._workspace.numel()

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        """Device memory of the schedule, as bytes. Good for `reset_workspace_buffer`; nothing else may write it."""
        return self._variants.base.staging.memory.view(torch.uint8)

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        """Host memory from which the schedule is copied, as bytes."""
        return self._variants.base.staging.host_memory.view(torch.uint8)

    @property
    def _custom_mask_buf(self) -> torch.Tensor | None:
        """The caller's buffer with CUDA graphs, else the packed mask of the plan; None without either."""
        if self._use_cuda_graph:
            return None if self._mask_buffers is None else self._mask_buffers[0]
        return None if self._request is None else self._request.mask.packed

    @property
    def _mask_indptr_buf(self) -> torch.Tensor | None:
        """The caller's buffer with CUDA graphs, else a new copy of the mask's byte offsets; None without a mask."""
        if self._use_cuda_graph:
            return None if self._mask_buffers is None else self._mask_buffers[1]
        if self._request is None or self._request.mask.packed is None:
            return None
        return self._on_device(self._request.mask.offsets)

    # ---- index buffers

    @property
    def _qo_indptr_buf(self) -> torch.Tensor | None:
        return self._lengths_buffer("_qo_indptr_buf")

    @property
    def _kv_indptr_buf(self) -> torch.Tensor | None:
        return self._lengths_buffer("_kv_indptr_buf")

    @property
    def _paged_kv_indptr_buf(self) -> torch.Tensor | None:
        return self._lengths_buffer("_paged_kv_indptr_buf")

    @property
    def _paged_kv_last_page_len_buf(self) -> torch.Tensor | None:
        return self._lengths_buffer("_paged_kv_last_page_len_buf")

    @property
    def _paged_kv_indices_buf(self) -> torch.Tensor | None:
        """The page numbers that launches read: the caller's buffer with CUDA graphs, else those of the plan."""
        if self._use_cuda_graph:
            return self._indices_buffer()
        return None if self._request is None else self._request.tokens.kv_indices

    def _lengths_buffer(self, name: str) -> torch.Tensor | None:
        for parameter in (name[1:], f"{name[1:]}fer"):  # of prefill and of decode wrappers
            if parameter in self._index_buffers:
                return self._index_buffers[parameter]
        if name in self._copies:
            return self._copies[name].tensor
        if self._request is None or (numbers := _planned_lengths(name, self._request.tokens)) is None:
            return None
        tensor = self._on_device(numbers)
        if self._use_cuda_graph or (self._request.tokens.q_len is not None and name == "_qo_indptr_buf"):
            return tensor  # of a decode plan, which says how many tokens every request has
        self._copies[name] = IndexCopy(tensor, tensor._version)
        self._plan = None  # so that runs look at the copy first
        return tensor

    def _on_device(self, numbers: np.ndarray) -> torch.Tensor:
        with capture.lasting():  # an inference tensor does not count its changes either
            return int32(numbers).to(self.device)

    def _forget_copies(self) -> None:
        self._copies = {}

    def _follow_copies(self) -> None:
        """Plan the lengths of the copies again if one was written. Costs a synchronisation per copy on a GPU."""
        written = [name for name, (tensor, version) in self._copies.items() if tensor._version != version]
        if not written:
            return
        if is_capturing(self.device):
            raise RuntimeArgumentError(
                f"{written[0]} was written after plan(), and its lengths must be scheduled by a run before the capture "
                "of a CUDA graph"
            )
        with self._lock:
            assert self._request is not None
            if self._request.mask.packed is not None or self._request.tokens.multi_item:
                raise RuntimeArgumentError(f"{written[0]} must not be written: the mask belongs to the planned lengths")
            copies, overrides = self._copies, self._current.overrides
            self._make_plan(self._request._replace(tokens=_rewritten(self._request, copies)))
            self._current = self._variant(overrides)
            self._copies = {name: IndexCopy(tensor, tensor._version) for name, (tensor, _) in copies.items()}


def _planned_lengths(name: str, tokens: Tokens | DeviceTokens) -> np.ndarray | None:
    """Return what a buffer holds; None for a buffer that wrappers of this kind do not have."""
    if name == "_qo_indptr_buf":
        return tokens.lengths.qo_indptr
    paged = tokens.kv_indices is not None
    if name == "_paged_kv_last_page_len_buf":
        return tokens.last_page_len
    return tokens.kv_indptr if paged == (name == "_paged_kv_indptr_buf") else None


def _rewritten(request: PlanRequest, copies: dict[str, IndexCopy]) -> Tokens:
    """Return the tokens of a plan with the lengths that the copies hold."""

    def lengths(name: str) -> torch.Tensor:
        if name in copies:
            return copies[name].tensor
        numbers = _planned_lengths(name, request.tokens)
        assert numbers is not None
        return torch.from_numpy(numbers)

    tokens = request.tokens
    if tokens.kv_indices is None:
        return batch_plan.ragged(lengths("_qo_indptr_buf"), lengths("_kv_indptr_buf"))
    qo_indptr = batch_plan.indptr("_qo_indptr_buf", lengths("_qo_indptr_buf"))
    kv_indptr, last = lengths("_paged_kv_indptr_buf"), lengths("_paged_kv_last_page_len_buf")
    names = ("_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")
    pages = batch_plan.Pages(kv_indptr, tokens.kv_indices, last)
    return batch_plan.paged(qo_indptr, pages, request.page_size, names)._replace(q_len=tokens.q_len)
